//! Health, metrics and status pages for kubelet, load balancers, Prometheus and people.
//!
//! Invariant: this crate only observes. Nothing here changes or delays what is served, and a failure here stops nothing
//! else.

#![forbid(unsafe_code)]

mod admin;
mod bind;
mod bind_address;
mod client;
mod counters;
mod explain_page;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod handlers;
mod health;
mod health_checks;
mod http_connections;
mod metrics;
mod moment;
mod rates;
mod server;
mod state;
mod status;
mod streaming;
mod timeline;
mod totals;
mod trace_body;
mod trace_page;
mod ui;
mod z_pages;

#[cfg(test)]
mod fixtures;

pub use admin::{Admin, TraceGuard};
pub use bind_address::BindAddress;
pub use client::{Listener, get, page, query_explanation, query_readiness, query_status, query_trace};
pub use explain_page::{NoAnswer, PendingAnswer};
pub use handlers::PageGroup;
pub use health::STALE_AFTER;
pub use health_checks::{BindFailure, HealthChecks};
pub use rates::{History, Rates, rate};
pub use server::Servers;
pub use state::{CounterLookup, Inherited, PortCountLookup, Role};
pub use status::{
    CountersStatus, EjectedStatus, RejectedStatus, Revision, SourceStatus, Status, TableStatus,
};
pub use trace_page::{PendingTrace, TraceFilters, TraceStatus};
pub use ui::UiAddress;
pub use z_pages::Configuration;

/// The version of this binary.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit of its sources, which `cargo xtask` gives to the compiler of a release.
pub const COMMIT: &str = match option_env!("KUBE_PROXY_EBPF_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};
