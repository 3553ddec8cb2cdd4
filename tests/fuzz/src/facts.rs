//! Any bytes as what another brain says of a cluster.

use brain::{Options, node_state};
use model::cluster::ClusterState;
use prost::Message as _;
use proxy_contract::{
    client::ClusterService,
    globalv1::{EndpointInfo, ServiceInfo},
};

use crate::laws;

/// What can be read of a Service and its endpoints are facts, and they make a state.
///
/// The bytes are messages with their lengths before them: a Service, and endpoints.
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
    let decoded = wire::cluster::service_with_slices(&message);
    laws::rejected(&decoded.rejected);
    let Some((service, slices)) = decoded.value else { return };
    let mut facts = ClusterState::default();
    for slice in slices {
        assert_eq!(slice.service, service.name, "a slice is one of its Service");
        facts.set_slice(slice);
    }
    facts.set_service(service);
    laws::state(&node_state(&facts, "n1", &Options::default()));
}
