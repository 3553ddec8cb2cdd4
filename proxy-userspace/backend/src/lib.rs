//! Backends: each consumes the full state of a node and makes its node behave so.
//!
//! The one rule: nothing here knows Kubernetes; everything is decided in the state.

mod addresses;
mod agent;
mod check;
mod netlink;
mod node;
mod observe;

pub mod ebpf;
pub mod flows;
pub mod nft;

pub use addresses::read as interfaces;
pub use agent::follow;
pub use check::check;
pub use node::{Error, Node, Options};
pub use observe::{Doing, Observer};
