//! The cluster's facts as the messages of `globalv1`, and back.
//!
//! The one rule: facts that came this way give every node the state that they gave before.
//! What is of no consequence to any state is left out: headless Services and slices, slices without ports.

mod decode;
mod encode;

pub use decode::{ClusterDecoder, service_with_slices};
pub use encode::{EndpointKeys, endpoint_info, is_service_sent, is_slice_sent, node_info, service_info};

/// The label that names the proxy which serves a Service.
const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// The label that names the zone of a Node.
const ZONE: &str = "topology.kubernetes.io/zone";

#[cfg(test)]
mod tests;
