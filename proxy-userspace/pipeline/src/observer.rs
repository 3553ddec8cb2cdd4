//! What a running pipeline reports.

use std::time::SystemTime;

use model::Rejected;

/// Receives reports of a running pipeline. `()` discards them.
pub trait Observer {
    /// The status of a source has changed, or has been checked again.
    fn source(&self, name: &str, status: SyncStatus);

    /// The items that a stage rejects now; they replace those reported before.
    fn rejected(&self, stage: Stage, items: Vec<Rejected>);
}

impl Observer for () {
    fn source(&self, _: &str, _: SyncStatus) {}
    fn rejected(&self, _: Stage, _: Vec<Rejected>) {}
}

/// How far a source has been read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SyncStatus {
    /// Whether everything has been read once.
    pub is_synced: bool,
    /// When the source was last heard from, if that is known.
    pub last_contact: Option<SystemTime>,
    /// The current error.
    pub error: Option<String>,
}

/// The stage of the pipeline that rejects an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Reading and converting the objects.
    Source,
    /// Deriving the node's state.
    Brain,
}
