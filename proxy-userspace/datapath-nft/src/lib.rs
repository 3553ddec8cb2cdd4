//! The nftables datapath: translates packets, for traffic without a local socket and for nodes without eBPF.
//!
//! Invariant: data in maps, behavior in chains.
//! A Service adds elements, keyed by address, protocol and port; the chains are shared by all Services. So a change costs what
//! it changes, in user space and in the kernel.

mod apply;
mod datapath;
mod encode;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
#[cfg(test)]
mod in_netns;
mod observe;
mod plan;

pub use self::{
    apply::conntrack_settings::ConntrackSettings,
    datapath::{Datapath, FlowPassObserver, Options, cleanup},
    encode::tables::TABLE,
    error::Error,
    observe::{
        check,
        counters::ExternalConnections,
        dump::{Lookup, PacketTarget, dump, frontend_addresses, frontends_at, lookup},
        node_settings::NodeSettings,
        trace::{PacketTrace, PacketTraceItem, PacketVerdict, TracedDestination, TracedPacket, frontends},
    },
    plan::config::{Config, DetectLocal},
};
