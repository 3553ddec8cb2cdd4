//! Where the cluster state comes from: manifests, an API server, another brain.
//!
//! Invariant: nothing is handed over before everything has been read once, and newer data replaces data that has not been
//! taken yet. A source hands over whole states, or everything once and changes after that; nothing queues.

#![forbid(unsafe_code)]

pub mod api;
pub mod file;
pub mod kube;
pub mod kube_types;
mod rejection_log;
mod text;

pub use rejection_log::{RejectionLog, log_rejected};
