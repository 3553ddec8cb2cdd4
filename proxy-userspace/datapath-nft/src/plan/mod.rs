//! The tables that a state calls for: which chains, rules and elements.
//!
//! May know: states, and [`encode`](crate::encode). Pure: reads and writes nothing.

pub(crate) mod affinity;
pub(crate) mod affinity_numbers;
pub(crate) mod compile;
pub(crate) mod config;
pub(crate) mod endpoint_selector;
pub(crate) mod forwarding;
pub(crate) mod layout;
pub(crate) mod removed_udp;
pub(crate) mod rules;
pub(crate) mod source_list;
pub(crate) mod untracked;
pub(crate) mod watch;
