//! The vocabulary: what a cluster says ([`facts`]) and what one node must do about it ([`state`]).
//!
//! The one rule: plain data only.
//! No IO, no clock, no wire format, no Kubernetes client types, no kernel types.

mod name;

pub mod facts;
pub mod state;

pub use name::{Family, Protocol, ServiceName};
