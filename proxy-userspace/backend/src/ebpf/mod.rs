//! The eBPF backend: compiles a state into tables, writes them into the kernel's maps, and keeps the programs attached.

mod changes;
mod compile;
mod dump;
mod error;
mod fault;
mod hooks;
mod kernel;
mod layout;
mod node;
mod object;
mod pins;
mod places;
mod plane;
mod store;
mod sys;

#[cfg(test)]
mod memory;

pub use dump::dump;
pub use error::Error;
pub use node::{Cleaned, Node, Options, Report, cleanup};
pub use places::NodePortAddresses;
