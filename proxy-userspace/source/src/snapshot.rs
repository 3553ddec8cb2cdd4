//! The whole cluster state at one time.

use std::sync::Arc;

use model::{Rejected, cluster::ClusterState};
use tokio::sync::watch;

/// What a source knows at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The state of the cluster.
    pub cluster: Arc<ClusterState>,
    /// Rejected parts of objects; the rest of these objects is in `cluster`.
    pub rejected: Vec<Rejected>,
    /// Errors of the source itself, such as files that do not parse and duplicate objects.
    pub problems: Vec<String>,
}

/// Receives the newest snapshot of a source; `None` until the first one is complete.
pub type Snapshots = watch::Receiver<Option<Arc<Snapshot>>>;
