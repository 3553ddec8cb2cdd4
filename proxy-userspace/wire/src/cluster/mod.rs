//! Encodes and decodes the state of a cluster as messages of `globalv1`.
//!
//! Invariant: a decoded cluster state gives every node the same state as the original.
//! Objects that affect no node state are not sent: headless Services and slices, and slices without ports.

mod decode;
mod encode;
mod labels;

pub use decode::{ClusterDecoder, service_with_slices};
pub use encode::{EndpointKeys, endpoint_info, is_service_sent, is_slice_sent, node_info, service_info};

#[cfg(test)]
mod tests;
