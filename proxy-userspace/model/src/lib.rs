//! The vocabulary: what a cluster says ([`cluster`]) and what one node must do about it ([`state`]).
//!
//! The one rule: plain data only.
//! No IO, no clock, no wire format, no Kubernetes client types, no kernel types.

#![forbid(unsafe_code)]

mod name;
mod rejected;
mod time;

pub mod cluster;
pub mod services;
pub mod state;

pub use name::{Family, Protocol, ServiceName};
pub use rejected::Rejected;
pub use time::Timestamp;
