//! Encodes and decodes the state of a cluster as messages of `globalv1`.
//!
//! Invariant: a decoded cluster state gives every node the same state as the original.
//! Objects that affect no node state are not sent: headless Services and slices, and slices without ports.

mod decode;
mod encode;

pub use decode::{ClusterDecoder, service_with_slices};
pub use encode::{
    endpoint_info, endpoints_by_key, is_node_sent, is_service_sent, is_slice_sent, node_info, service_info,
};

/// The label of a Service with the name of its proxy.
const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// The label of a Node with the name of its zone.
const ZONE: &str = "topology.kubernetes.io/zone";

#[cfg(test)]
mod tests;
