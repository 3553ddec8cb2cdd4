//! The eBPF backend: compiles a state into tables, writes them into the kernel's maps, and keeps the programs attached.

mod changes;
pub mod check;
mod chunks;
mod compile;
mod counters;
mod counts;
mod dump;
mod error;
mod fault;
mod hooks;
mod kernel;
mod layout;
mod look;
mod node;
mod object;
mod pins;
mod places;
mod plane;
mod store;
mod sys;

#[cfg(test)]
mod memory;

pub use counts::{Counts, PortCounts, PortId, counts};
pub use dump::{Led, dump, led};
pub use error::Error;
pub use look::{Hook, Hooks, Other, look_at};
pub use node::{Cleaned, Node, Options, Report, TableFill, cleanup};
pub use places::NodePortAddresses;
