//! The view of an operator: dump, lookup for `explain`, usage of tables, and the checks of a node.
//!
//! May know: everything below. Changes nothing.

pub(crate) mod active_frontends;
pub mod check;
pub(crate) mod dump;
pub(crate) mod forwards;
pub(crate) mod lookup;
pub(crate) mod table_stats;
