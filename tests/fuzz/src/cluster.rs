//! Arbitrary bytes as the cluster state of another brain.

use brain::{Options, node_state};
use model::{RequestedMetadata, cluster::ClusterState};
use prost::Message as _;
use proxy_contract::{
    client::ClusterService,
    globalv1::{EndpointInfo, ServiceInfo},
};

use crate::invariants;

/// A Service and its endpoints that can be decoded are a cluster state, from which a node state can be derived.
///
/// The input is a sequence of length-delimited messages: a Service, then endpoints.
pub fn target(mut bytes: &[u8]) {
    let Ok(service) = ServiceInfo::decode_length_delimited(&mut bytes) else { return };
    let mut message = ClusterService { service, ..ClusterService::default() };
    while let Ok(endpoint) = EndpointInfo::decode_length_delimited(&mut bytes) {
        let key = format!("{}|{}", endpoint.source_name, message.endpoints.len());
        message.endpoints.insert(key.into(), endpoint.into());
        if bytes.is_empty() {
            break;
        }
    }
    let decoded = wire::cluster::service_with_slices(&message, &RequestedMetadata::everything());
    invariants::rejected(&decoded.rejected);
    let Some((service, slices)) = decoded.value else { return };
    let mut cluster = ClusterState::default();
    for slice in slices {
        assert_eq!(slice.service, service.name, "a slice belongs to its Service");
        cluster.set_slice(slice);
    }
    cluster.set_service(service);
    invariants::state(&node_state(&cluster, "n1", &Options::default()));
}
