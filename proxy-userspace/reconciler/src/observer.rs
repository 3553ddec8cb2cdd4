//! What the reconciler does, for health, metrics and status.
//!
//! Invariant: an observer is notified, never asked. Nothing that it does or fails to do changes what is served.

use std::{sync::Arc, time::Duration};

use datapath::{ApplyReport, AttachStatus, PacketAffinity, ProbeResult, TableStats};
use model::Rejected;
use publish::Published;

/// Is notified of what the reconciler does, in the order in which it happens.
///
/// Every method returns at once.
pub trait Observer {
    /// The reconciler has taken a state to apply it; again if an earlier attempt failed.
    fn on_dequeued(&self, published: &Arc<Published>);

    /// A state is active, `took` after it was dequeued.
    fn on_applied(&self, published: &Arc<Published>, report: &ApplyReport, took: Duration);

    /// A step failed and will be retried; the previous state stays active.
    fn on_failed(&self, step: Step, error: &str);

    /// The kernel was queried for the attached programs.
    fn on_attach_checked(&self, status: Result<&AttachStatus, &str>);

    /// Why the packet path is unavailable or behind; `None` if it is not.
    fn on_packet_path(&self, unavailable: Option<&Rejected>);

    /// The packet path was maintained: its clients with session affinity, `None` if no Service has session affinity, and whether
    /// kube-proxy has rules beside its own.
    fn on_upkeep(&self, affinity: Option<PacketAffinity>, has_kube_proxy_rules: bool);

    /// The hooks were probed.
    fn on_probed(&self, results: &[ProbeResult]);

    /// The usage of the tables that clients fill was read.
    fn on_table_stats(&self, stats: TableStats);
}

/// A step of the reconciler that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// Writing a state into the maps or the tables.
    Apply,
    /// Attaching the programs, or repairing the tables.
    Attach,
    /// Preparing the spare maps for the next change.
    Finish,
}

impl Step {
    pub const ALL: [Self; 3] = [Self::Apply, Self::Attach, Self::Finish];

    /// Its name, as in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Apply => "apply",
            Self::Attach => "attach",
            Self::Finish => "finish",
        }
    }
}
