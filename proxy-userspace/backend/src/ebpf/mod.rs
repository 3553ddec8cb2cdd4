//! The eBPF backend: compiles a state into tables, writes them into the kernel's maps, and keeps the programs attached.

mod btf;
mod cgroup;
mod changes;
pub mod check;
mod chunks;
mod compile;
mod counters;
mod counts;
mod dump;
mod ending;
mod error;
mod exclusions;
mod fault;
mod features;
mod flows;
mod hooks;
mod kernel;
mod layout;
mod look;
mod node;
mod object;
mod peers;
mod pinned;
mod pins;
mod places;
mod plane;
mod remembered;
mod store;
mod sys;

#[cfg(test)]
mod memory;

pub(crate) use cgroup::Cgroup;
pub use counts::{Counts, PortCounts, PortId, counts};
pub use dump::{Led, dump, generation, led};
pub use ending::{Ended, Ender};
pub use error::Error;
pub(crate) use flows::{differ as flows_differ, lost as flows_lost};
pub use look::{Hook, Hooks, Other, look_at};
pub use node::{Cleaned, Node, Options, Report, TableFill, cleanup};
pub use peers::UdpMemory;
pub use places::NodePortAddresses;
pub use remembered::Memory;
pub use sys::{give_back_memory, keep_one_heap};
