//! The view of an operator: dump, lookup for `explain`, trace, and the checks of a node.
//!
//! May know: everything below. Changes nothing but the table of a trace.

pub mod check;
pub(crate) mod counters;
pub(crate) mod dump;
pub(crate) mod kube_proxy;
pub(crate) mod node_settings;
pub(crate) mod trace;
