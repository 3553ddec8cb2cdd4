//! The nftables datapath: translates packets, for traffic without a local socket and for nodes without eBPF.
//!
//! Invariant: data in maps, behaviour in chains.
//! A Service adds elements, keyed by address, protocol and port; the chains are shared by all Services. So a change costs what
//! it changes, in user space and in the kernel.

mod affinity;
mod affinity_numbers;
mod affinity_usage;
mod chain;
mod compile;
mod config;
mod conntrack_settings;
mod datapath;
mod dump;
mod elements;
mod endpoint_selector;
mod error;
mod expressions;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
#[cfg(test)]
mod in_netns;
mod kube_proxy;
mod layout;
mod node_settings;
mod removed_udp;
mod rules;
mod schema;
mod snapshot;
mod source_list;
mod tables;
mod trace;
mod transaction;
mod unassigned;
mod untracked;
mod verdict;
mod watch;

pub mod check;

pub use self::datapath::{Datapath, FlowPassObserver, Options, cleanup};
pub use config::{Config, DetectLocal};
pub use conntrack_settings::{ConntrackSettings, NotSet};
pub use dump::{Lookup, PacketTarget, active_frontends, dump, lookup};
pub use error::Error;
pub use node_settings::NodeSettings;
pub use trace::{
    MAX_DESTINATIONS, PacketTrace, PacketTraceItem, PacketVerdict, TracedDestination, TracedPacket, frontends,
};

/// The name of our tables, one in the family `ip` and one in `ip6`. Tables of other names are never touched.
/// The name of our tables.
pub const TABLE: &str = "kube-proxy-ebpf";
