//! The newest reports about the kernel: attach checks, probes and tables.

use datapath::{AttachStatus, HookBehavior, PacketAffinity, ProbeResult, TableStats};
use model::Rejected;
use tokio::time::Instant;

#[derive(Debug, Default)]
pub(crate) struct DatapathState {
    /// The result of the last successful attach check.
    pub(crate) attach_status: Option<AttachStatus>,
    /// The last check that found all programs attached; before that, the first check.
    pub(crate) last_attached: Option<Instant>,
    /// The error of the last attach check.
    pub(crate) attach_check_error: Option<String>,
    /// Why the packet path is unavailable or behind.
    pub(crate) packet_path_error: Option<Rejected>,
    /// The results of the last probe.
    pub(crate) probe_results: Vec<ProbeResult>,
    /// The last conclusive probe; before that, the time since when one is expected. Where the hooks could never be probed,
    /// the last attempt.
    pub(crate) last_probe: Option<Instant>,
    has_conclusive_probe: bool,
    pub(crate) table_stats: TableStats,
    /// As of the last count.
    pub(crate) packet_affinity: PacketAffinity,
    /// Whether kube-proxy has rules beside ours.
    pub(crate) has_kube_proxy_rules: bool,
}

impl DatapathState {
    pub(crate) fn on_attach_checked(&mut self, status: Result<&AttachStatus, &str>, now: Instant) {
        let first = *self.last_attached.get_or_insert(now);
        match status {
            Ok(status) => {
                self.last_attached = Some(if status.is_complete() { now } else { first });
                // From now on probes are expected, if there are programs.
                if status.is_complete() && status.hooks.iter().any(|it| it.program.is_some()) {
                    self.last_probe.get_or_insert(now);
                }
                self.attach_check_error = None;
                self.attach_status = Some(status.clone());
            }
            Err(error) => self.attach_check_error = Some(error.to_owned()),
        }
    }

    pub(crate) fn on_probed(&mut self, results: &[ProbeResult], now: Instant) {
        let is_conclusive = results.iter().any(|it| !matches!(it.behavior, HookBehavior::Unknown(_)));
        self.has_conclusive_probe |= is_conclusive;
        if is_conclusive || !self.has_conclusive_probe {
            self.last_probe = Some(now);
        }
        self.probe_results = results.to_vec();
    }
}
