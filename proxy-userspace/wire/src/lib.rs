//! What the messages of the contract mean: a node's state here, the cluster's facts in [`cluster`]; both ways.
//!
//! The one rule: there and back again is the same state.
//! What another brain leaves unsaid has the meaning the contract gives to it; what cannot be read is refused alone.

#![forbid(unsafe_code)]

pub mod cluster;
mod decode;
mod encode;
mod extensions;
mod node;
mod node_state;

use model::{
    ServiceName,
    state::{Endpoint, EndpointKey},
};

pub use decode::{Decoded, service_state};
pub use encode::{endpoint, service, service_with_extensions};
pub use extensions::Extensions;
pub use node::node;
pub use node_state::NodeStateDecoder;

/// The path of a Service in the services set.
pub fn service_path(name: &ServiceName) -> String {
    name.to_string()
}

/// The path of an endpoint in the endpoints set.
pub fn endpoint_path(service: &ServiceName, endpoint: &Endpoint) -> String {
    format!("{service}/{}", key(endpoint))
}

/// What stands for an endpoint in its path.
pub fn key(endpoint: &Endpoint) -> &str {
    match &endpoint.key {
        EndpointKey::Pod(key) | EndpointKey::Anonymous(key) => key,
    }
}

#[cfg(test)]
mod tests;
