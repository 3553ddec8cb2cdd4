//! What a running pipeline reports.

use std::time::SystemTime;

use model::Rejections;
use tokio::time::Instant;

/// Receives reports of a running pipeline. `()` discards them.
pub trait Observer {
    /// The status of a source has changed, or has been checked again.
    fn source(&self, name: &str, status: SyncStatus);

    /// What a stage rejects now, which replaces what was reported before. They have been logged.
    fn rejected(&self, stage: Stage, rejections: &Rejections);

    /// The entries of the largest namespace ([`brain::Options::max_namespace_entries`]).
    fn namespace_entries(&self, most: u64);

    /// The state of this node is published; again with the same revision if it did not change.
    fn published(&self, steps: &PublishSteps);
}

/// When each step toward a published state of this node ended.
#[derive(Clone, Copy, Debug)]
pub struct PublishSteps {
    /// The process that numbers the revisions.
    pub instance_id: u64,
    pub rev: u64,
    /// The source had handed over what changed.
    pub received: Instant,
    /// The brain had computed the state; the same as `received` if another brain did.
    pub computed: Instant,
    pub published: Instant,
}

impl Observer for () {
    fn source(&self, _: &str, _: SyncStatus) {}
    fn rejected(&self, _: Stage, _: &Rejections) {}
    fn namespace_entries(&self, _: u64) {}
    fn published(&self, _: &PublishSteps) {}
}

/// How far a source has been read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SyncStatus {
    /// Where it is, if it has an address.
    pub address: Option<String>,
    /// Whether everything has been read once.
    pub is_synced: bool,
    /// When the source was last heard from, if that is known.
    pub last_contact: Option<SystemTime>,
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
