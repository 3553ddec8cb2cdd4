//! Where facts come from: manifests, an API server, another brain.
//!
//! The one rule: a source hands over whole snapshots, and nothing before its first one is complete.
//! The newest wins; nothing queues.

#![forbid(unsafe_code)]

pub mod api;
pub mod file;
pub mod kube_types;

use std::sync::Arc;

use model::facts::{Facts, Rejected};

/// What a source has to say at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// What the cluster says.
    pub facts: Arc<Facts>,
    /// Parts of objects that were refused; the rest of them is in the facts.
    pub rejected: Vec<Rejected>,
    /// What is wrong with the source itself, for people: files that do not parse, objects that are there twice.
    pub problems: Vec<String>,
}

/// Where a source's snapshots arrive: always the newest, and `None` until the first is complete.
pub type Snapshots = tokio::sync::watch::Receiver<Option<Arc<Snapshot>>>;
