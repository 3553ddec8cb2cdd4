//! Backends: each consumes the full state of a node and makes its node behave so.
//!
//! The one rule: nothing here knows Kubernetes; everything is decided in the state.

mod addresses;
mod agent;
mod canary;
mod check;
mod claim;
mod ending;
mod former;
mod namespaces;
mod netlink;
mod node;
mod observe;
mod said;
mod sock_diag;

pub mod ebpf;
pub mod flows;
pub mod nft;

pub use addresses::read as interfaces;
pub use agent::follow;
pub use canary::{Answer, COMMAND as CANARY, Heard, obey as obey_as_canary};
pub use check::check;
pub use ebpf::{give_back_memory, keep_one_heap};
pub use node::{Error, Node, Options};
pub use observe::{Doing, Observer};
