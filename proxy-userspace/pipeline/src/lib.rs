//! Source, brain and publisher, joined: cluster state in, revisions of node states out.
//!
//! Invariant: nothing is published before the source is complete.

#![forbid(unsafe_code)]

mod config;
mod explain;
mod node_check;
mod observer;
mod pipeline;
mod snapshot;
mod source_updates;

pub use config::{Config, Error, SourceConfig};
pub use explain::{Explainer, NoReasons};
pub use node_check::unknown_node;
pub use observer::{Observer, PublishSteps, Stage, SyncStatus};
pub use pipeline::Pipeline;
pub use snapshot::read_manifests;
