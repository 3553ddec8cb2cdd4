//! Health, metrics and status pages for kubelet, load balancers, Prometheus and people.
//!
//! Invariant: this crate only observes. Nothing here changes or delays what is served, and a failure here stops nothing
//! else.

#![forbid(unsafe_code)]

mod admin;
#[cfg(test)]
mod fixtures;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod health;
mod http;
mod metrics;
mod pages;
mod state;
mod ui;

pub use admin::{Admin, TraceGuard};
pub use health::{BindFailure, HealthChecks, STALE_AFTER};
pub use http::{
    BindAddress, Listener, PageGroup, Servers, get, page, query_explanation, query_readiness, query_status,
    query_trace,
};
pub use pages::{
    CountersStatus, EjectedStatus, RejectedStatus, Revision, SourceStatus, Status, TableStatus, TraceStatus,
};
pub use state::{
    Configuration, CounterLookup, Explainer, Inherited, PendingAnswer, PendingTrace, PortCountLookup,
    Readers, Role, TraceFilters,
    rates::{History, Rates, rate},
};
pub use ui::UiAddress;

pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit of its sources, which `cargo xtask` gives to the compiler of a release.
pub const COMMIT: &str = match option_env!("KUBE_PROXY_EBPF_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};
