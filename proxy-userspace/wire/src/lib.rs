//! What the messages of the contract mean: a node's state here, the cluster's facts in [`facts`]; both ways.
//!
//! The one rule: there and back again is the same state.
//! What another brain leaves unsaid has the meaning the contract gives to it; what cannot be read is refused alone.

#![forbid(unsafe_code)]

mod additions;
mod decode;
mod decoder;
mod encode;
pub mod facts;
mod node;

use model::{
    ServiceName,
    state::{Endpoint, EndpointKey},
};

pub use additions::Additions;
pub use decode::{Decoded, service_state};
pub use decoder::Decoder;
pub use encode::{endpoint, service, service_of};
pub use node::node;

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
