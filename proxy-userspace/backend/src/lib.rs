//! Backends: each consumes the full state of a node and makes its node behave so.
//!
//! The one rule: nothing here knows Kubernetes; everything is decided in the state.

mod rejected;

pub mod ebpf;

pub use rejected::Rejected;
