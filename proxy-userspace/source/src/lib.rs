//! Where facts come from: manifests, an API server, another brain.
//!
//! The one rule: nothing is handed over before all is known, and what is new replaces what was not fetched yet.
//! A source hands over whole snapshots, or everything once and then what changes; nothing queues.

#![forbid(unsafe_code)]

pub mod api;
mod cluster_changes;
pub mod file;
pub mod kube;
pub mod kube_types;

use std::sync::Arc;

use model::cluster::{ClusterState, Rejected};

pub use cluster_changes::ClusterChanges;

/// What a source has to say at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// What the cluster says.
    pub facts: Arc<ClusterState>,
    /// Parts of objects that were refused; the rest of them is in the facts.
    pub rejected: Vec<Rejected>,
    /// What is wrong with the source itself, for people: files that do not parse, objects that are there twice.
    pub problems: Vec<String>,
}

/// Where a source's snapshots arrive: always the newest, and `None` until the first is complete.
pub type Snapshots = tokio::sync::watch::Receiver<Option<Arc<Snapshot>>>;
