//! The nftables backend: translates packets, for traffic that has no socket here and for nodes without eBPF.
//!
//! The one rule: data in maps, behaviour in chains.
//! What a Service adds are elements, keyed by address, protocol and port; the chains are there for all of them, so that a
//! change costs what it changes, for us and for the kernel.

mod compile;
mod config;
mod datapath;
mod dump;
mod elements;
mod endpoint_selector;
mod error;
mod expressions;
mod layout;
mod rules;
mod schema;
mod snapshot;
mod tables;
mod transaction;

pub mod check;

pub use self::datapath::{Datapath, Options, cleanup};
pub use config::{Config, DetectLocal};
pub use dump::{active_frontends, dump};
pub use error::Error;

/// The name of our tables, one of the family `ip` and one of `ip6`. Tables of other names are never touched.
const TABLE: &str = "kube-proxy-ebpf";
