//! Follows the published state of this node and drives both datapaths: sockets by eBPF, packets by nftables.
//!
//! Invariant: nothing here knows Kubernetes; everything is decided in the state.

mod datapath;
mod draining;
mod log_dedup;
mod metrics;
mod observer;
mod packets;
mod progress;
mod reconciler;
mod reports;
mod socket_termination;
mod sockets;
mod translated_connections;
mod worker;

pub use self::{
    datapath::{Datapath, Error, Options},
    metrics::Metrics,
    observer::{Observer, Step},
    reconciler::{TraceRequest, run},
};
