//! The nftables backend: translates packets, for traffic that has no socket here and for nodes without eBPF.
//!
//! The one rule: data in maps, behaviour in chains.
//! What a Service adds are elements, keyed by address, protocol and port; the chains are there for all of them, so that a
//! change costs what it changes, for us and for the kernel.

mod check;
mod compile;
mod config;
mod dump;
mod elements;
mod error;
mod expressions;
mod layout;
mod node;
mod pick;
mod rules;
mod schema;
mod snapshot;
mod tables;
mod transaction;

pub use check::tables as check;
pub(crate) use check::{machine, own};
pub use config::{Config, DetectLocal};
pub use dump::{dump, led};
pub use error::Error;
pub use node::{Node, Options, cleanup};

/// The name of our tables, one of the family `ip` and one of `ip6`. Tables of other names are never touched.
const TABLE: &str = "kube-proxy-ebpf";
