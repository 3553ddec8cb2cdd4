//! The socket path (eBPF) as a datapath of a worker.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

use datapath::{ApplyReport, AttachStatus, TableStats};
use datapath_ebpf::{self as ebpf, CgroupEvents, PacketPath, TracedPrograms};
use model::{Family, error_chain};
use publish::Published;
use tokio::{sync::oneshot, time::Instant};

use crate::{
    socket_termination::SocketTermination,
    translated_connections::TranslatedConnections,
    worker::{Datapath, Desired, Next, next_of},
};

/// Interval between queries of the attached programs and of the tables that clients fill.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Interval between trial connects to ejected endpoints.
const TRIAL_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) struct Sockets {
    datapath: ebpf::Datapath,
    cgroups: Option<CgroupEvents>,
    termination: Option<SocketTermination>,
    /// The addresses of the host's interfaces, as of the last apply.
    interfaces: Option<Arc<BTreeSet<IpAddr>>>,
    /// The applied state, until it is finished.
    applied: Option<Arc<Published>>,
    next_check: Instant,
    next_trial: Instant,
    /// When the nodes that packets are forwarded to are probed, or answers are read.
    next_peer_probe: Instant,
    translated: TranslatedConnections,
}

pub(crate) enum SocketRequest {
    /// Whether the packet path translates what sockets leave to it; the sender tells whether that is in effect.
    PacketsServe(bool, oneshot::Sender<bool>),
    /// The packet path has another state.
    PacketsHave(Arc<Published>, Vec<Family>),
    /// Attach the programs of a trace instead of the product's; the sender tells why that failed.
    BeginTrace(Box<TracedPrograms>, oneshot::Sender<Result<(), String>>),
    /// Attach the product's programs again.
    EndTrace,
}

#[derive(Debug)]
pub(crate) struct SocketCheck {
    /// The attached programs; `None` before the first state is active.
    pub(crate) status: Result<Option<AttachStatus>, String>,
    /// The usage of the tables that clients fill.
    pub(crate) tables: Result<TableStats, String>,
}

impl Sockets {
    /// Must be called within a tokio runtime. What is forwarded follows the packet path, if there is one.
    pub(crate) fn new(
        mut datapath: ebpf::Datapath,
        termination: Option<SocketTermination>,
        has_packets: bool,
    ) -> Self {
        if has_packets {
            datapath.set_packet_path(PacketPath::Starting);
        }
        let now = Instant::now();
        Self {
            cgroups: datapath.cgroup_events(),
            datapath,
            termination,
            interfaces: None,
            applied: None,
            next_check: now,
            next_trial: now,
            next_peer_probe: now,
            translated: TranslatedConnections::default(),
        }
    }

    fn refresh_exclusions(&mut self) {
        if let Err(error) = self.datapath.refresh_exclusions() {
            tracing::warn!(error = error_chain(&error), "excluded cgroups cannot be looked up");
        }
    }

    fn check(&mut self) -> SocketCheck {
        let status = self.datapath.attach_status().map_err(|it| error_chain(&it));
        self.refresh_exclusions();
        let tables = self.datapath.table_stats().map_err(|it| error_chain(&it));
        SocketCheck { status, tables }
    }
}

impl Datapath for Sockets {
    const NAME: &str = "sockets";
    type Request = SocketRequest;
    type Finding = SocketCheck;
    type Condition = ();
    type Error = ebpf::Error;

    fn apply(&mut self, desired: &Desired) -> Result<ApplyReport, ebpf::Error> {
        if let Some(termination) = &self.termination {
            termination.before_apply(&desired.published.state);
        }
        if self.interfaces.as_ref() != Some(&desired.interfaces) {
            self.datapath.set_interfaces(BTreeSet::clone(&desired.interfaces));
            self.interfaces = Some(Arc::clone(&desired.interfaces));
        }
        let report = self.datapath.apply(&desired.published.state)?;
        self.applied = Some(Arc::clone(&desired.published));
        Ok(report)
    }

    fn repair(&mut self) -> Result<(), ebpf::Error> {
        if self.datapath.has_new_peers() {
            self.next_peer_probe = Instant::now();
        }
        self.datapath.attach()
    }

    fn finish(&mut self) -> Result<(), ebpf::Error> {
        self.datapath.finish_generation()?;
        if let (Some(termination), Some(applied)) = (&mut self.termination, self.applied.take()) {
            termination.on_active(&applied);
        }
        Ok(())
    }

    fn next_maintenance(&self) -> Instant {
        self.next_check.min(self.next_trial).min(self.next_peer_probe)
    }

    fn maintain(&mut self) -> (Option<SocketCheck>, Next) {
        let now = Instant::now();
        let mut next = Next::Wait;
        if self.next_trial <= now {
            // Also notices a cgroup that was created anew.
            next = Next::Repair;
            self.next_trial = now + TRIAL_INTERVAL;
            if let Err(error) = self.datapath.try_ejected() {
                // `table_stats` reads the same records, and warns.
                tracing::debug!(error = error_chain(&error), "ejected endpoints cannot be tried");
            }
        }
        let check = (self.next_check <= now).then(|| {
            self.next_check = now + CHECK_INTERVAL;
            self.check()
        });
        if check.is_some() {
            next = if self.datapath.check_uplinks() { Next::Apply } else { Next::Repair };
        }
        if self.next_peer_probe <= now {
            let (is_changed, due) = self.datapath.probe_peers();
            self.next_peer_probe = now + due;
            if is_changed {
                next = Next::Apply;
            }
        }
        let ended = self.translated.ended(self.datapath.forwarding_begun(), now.into_std());
        if self.datapath.set_forwarding_settled(&ended) {
            next = Next::Apply;
        }
        (check, next)
    }

    fn serve(&mut self, request: SocketRequest) -> Next {
        match request {
            SocketRequest::PacketsServe(serve, done) => {
                let result = self.datapath.set_packets_serve(serve);
                if let Err(error) = &result {
                    tracing::warn!(
                        error = error_chain(error),
                        "sockets cannot be told whether packets are translated"
                    );
                }
                // The requester may be gone.
                let _ = done.send(result.is_ok());
            }
            SocketRequest::PacketsHave(published, second_chance) => {
                let state = published.state.clone();
                if self.datapath.set_packet_path(PacketPath::Has { state, second_chance }) {
                    return Next::Apply;
                }
            }
            SocketRequest::BeginTrace(programs, begun) => {
                // If the requester is gone, the trace ends at once.
                let _ = begun.send(self.datapath.begin_trace(*programs).map_err(|it| error_chain(&it)));
            }
            SocketRequest::EndTrace => self.datapath.end_trace(),
        }
        Next::Wait
    }

    async fn changed_externally(&mut self) {
        next_of(&mut self.cgroups, CgroupEvents::next).await;
    }

    /// A cgroup was created, perhaps one that is excluded.
    fn on_changed_externally(&mut self) -> bool {
        self.refresh_exclusions();
        false
    }

    fn condition(&self) {}
}
