//! Encodes and decodes the messages of the contract: the state of a node here, the state of a cluster in [`cluster`].
//!
//! Invariant: decoding an encoded state gives the same state.
//! Fields that another brain does not send have the meaning that the contract gives them; a field that cannot be parsed
//! is rejected, and the rest of its object is used.

#![forbid(unsafe_code)]

pub mod cluster;
mod decode;
mod encode;
mod extensions;
mod forwarding;
mod load_balancing;
mod node;
mod node_state;
mod reader;

pub use decode::service_state;
pub use encode::{
    endpoint, endpoint_key, endpoint_path, named_targets, service, service_path, service_with_extensions,
};
pub use extensions::Extensions;
pub use node::{node, pod, service_cidr};
pub use node_state::NodeStateDecoder;
pub use reader::Decoded;
