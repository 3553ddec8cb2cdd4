//! Log lines about conditions that last.
//!
//! Invariant: each condition is logged once, and again when it changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    io, mem,
};

use datapath::{
    AttachStatus, EjectedEndpoint, ForeignProgram, HookBehavior, ProbeResult, RefusedNamespace, TableStats,
    TerminationReport,
};
use netlink::sock_diag::Transport;

/// How many endpoints are logged one by one when they are ejected together.
const MAX_LOGGED: usize = 10;

#[derive(Debug, Default)]
pub(crate) struct LogDedup {
    /// The hooks that did not work at the last probe.
    failed_probes: Vec<ProbeResult>,
    /// Whose sockets are not served though they should be.
    unreached: Option<String>,
    /// Foreign programs, each with the hooks that it is attached to.
    foreign: BTreeMap<ForeignProgram, Vec<&'static str>>,
    /// Whose sockets cannot be terminated.
    no_termination: BTreeSet<Transport>,
    /// Whose sockets cannot be terminated in some namespaces.
    hidden_namespaces: BTreeSet<Transport>,
    /// How many datagrams had been refused.
    refused_calls: Option<u64>,
    ejected: BTreeSet<String>,
}

impl LogDedup {
    pub(crate) fn probed(&mut self, results: &[ProbeResult]) {
        let failed: Vec<_> = results.iter().filter(|it| it.behavior != HookBehavior::Ok).cloned().collect();
        // The details name ports and times, which differ each time.
        let is_known = |it: &ProbeResult| {
            let is_same =
                |known: &ProbeResult| mem::discriminant(&known.behavior) == mem::discriminant(&it.behavior);
            self.failed_probes.iter().any(|known| known.hook == it.hook && is_same(known))
        };
        for it in failed.iter().filter(|it| !is_known(it)) {
            match it.behavior {
                HookBehavior::Fails(_) => tracing::error!(hook = it.hook, result = %it, "probe failed"),
                _ => tracing::info!(hook = it.hook, result = %it, "probe impossible"),
            }
        }
        if failed.is_empty() && !self.failed_probes.is_empty() {
            tracing::info!("probe: all hooks work");
        }
        self.failed_probes = failed;
    }

    /// Whom the cgroup does not include, and which other programs are attached to it.
    pub(crate) fn attach_checked(&mut self, status: &AttachStatus) {
        if self.unreached != status.unreached {
            match &status.unreached {
                Some(unreached) => tracing::warn!("{unreached}"),
                None => tracing::info!(cgroup = %status.cgroup.display(), "the cgroup includes the pods now"),
            }
            self.unreached.clone_from(&status.unreached);
        }
        let foreign: BTreeMap<_, _> =
            status.foreign_programs().into_iter().map(|(it, hooks)| (it.clone(), hooks)).collect();
        for (it, hooks) in foreign.iter().filter(|(it, hooks)| self.foreign.get(it) != Some(hooks)) {
            tracing::warn!(
                program = %it, hooks = hooks.join(", "),
                "a foreign program is attached to our hooks; the first match translates a connection; see `check`"
            );
        }
        for it in self.foreign.keys().filter(|it| !foreign.contains_key(it)) {
            tracing::info!(program = %it, "the foreign program is no longer attached to our hooks");
        }
        self.foreign = foreign;
    }

    pub(crate) fn terminated(&mut self, transport: Transport, report: &io::Result<TerminationReport>) {
        let socket = match transport {
            Transport::Tcp => "TCP connection",
            Transport::Udp => "connected UDP socket",
        };
        match report {
            Ok(report) => {
                if report.sockets != 0 {
                    tracing::info!(
                        socket,
                        terminated = report.sockets,
                        "sockets of removed endpoints terminated"
                    );
                }
                if !report.all_namespaces && self.hidden_namespaces.insert(transport) {
                    tracing::info!(
                        socket,
                        "sockets of some pods outlive their endpoint: to enter network namespaces takes CAP_SYS_ADMIN, \
                         CAP_SYS_PTRACE and the host's process IDs (hostPID)"
                    );
                }
            }
            Err(error) => {
                if self.no_termination.insert(transport) {
                    tracing::warn!(socket, %error, "sockets of removed endpoints are kept");
                }
            }
        }
    }

    pub(crate) fn table_stats(&mut self, stats: &TableStats) {
        let refused = stats.overflow.refused;
        // What was refused before this process started has been logged.
        let before = self.refused_calls.replace(refused).unwrap_or(refused);
        if refused > before {
            tracing::warn!(
                calls = refused - before,
                most = top_refused(&stats.refused),
                "no room to translate calls to Services (ENOBUFS); --udp-addresses and --socket-slots raise the limits, \
                 after `cleanup`"
            );
        }
        self.ejected(&stats.ejected);
    }

    fn ejected(&mut self, endpoints: &[EjectedEndpoint]) {
        let now: BTreeSet<_> = endpoints.iter().map(ToString::to_string).collect();
        let (mut new, mut back) = (now.difference(&self.ejected), self.ejected.difference(&now));
        for it in new.by_ref().take(MAX_LOGGED) {
            tracing::warn!(endpoint = it, "endpoint ejected: connections to it fail; see `status`");
        }
        for it in back.by_ref().take(MAX_LOGGED) {
            tracing::info!(endpoint = it, "endpoint no longer ejected");
        }
        let (new, back) = (new.count(), back.count());
        if new + back > 0 {
            tracing::warn!(
                ejected = new,
                returned = back,
                "more endpoints were ejected or have returned; see `status`"
            );
        }
        self.ejected = now;
    }
}

/// The namespaces with the most refusals.
fn top_refused(refused: &[RefusedNamespace]) -> String {
    let one = |it: &RefusedNamespace| {
        let cgroup = it.cgroup.as_deref().unwrap_or("a removed cgroup");
        format!("{cgroup} (network namespace {}): {}", it.netns, it.refused)
    };
    refused.iter().take(3).map(one).collect::<Vec<_>>().join(", ")
}
