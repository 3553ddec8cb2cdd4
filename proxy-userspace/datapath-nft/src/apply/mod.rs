//! The way into the kernel: transactions, the tables as they were found, and settings of connection tracking.
//!
//! May know: [`plan`](crate::plan), and the sockets of the crate `netlink`. Decides nothing about Services.

pub(crate) mod affinity_usage;
pub(crate) mod conntrack_settings;
pub(crate) mod snapshot;
pub(crate) mod transaction;
