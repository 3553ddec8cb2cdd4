//! The eBPF backend: compiles a state into tables, writes them into the kernel's maps, and keeps the programs attached.

mod changes;
mod compile;
mod fault;
mod layout;
mod plane;
mod store;

#[cfg(test)]
mod memory;

pub use compile::{FrontendAddress, Transport};
pub use plane::{Applied, Plane};
pub use store::{Side, Store, StoreError, Table};
