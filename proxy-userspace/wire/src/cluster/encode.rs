//! Encodes the objects of a cluster.

use std::collections::BTreeMap;

use model::{
    Family, Timestamp,
    cluster::{Endpoint, EndpointSlice, Node, Service},
    state::ServiceKind,
};
use prost::Message;
use proxy_contract::{
    globalv1::{self, EndpointConditions, EndpointInfo, NodeInfo, ServiceInfo, TopologyHints, TopologyInfo},
    localv1::{self, PortName},
};
use twox_hash::XxHash64;

use super::{PROXY_NAME, ZONE};
use crate::{
    encode::{leave_out_untargeted, protocol, service},
    node::node,
};

/// Whether a Service is sent: if it can be served, by this proxy or by any.
pub fn is_service_sent(service: &Service, proxy_name: Option<&str>, other_proxies: bool) -> bool {
    service.kind != ServiceKind::ExternalName
        && !service.cluster_ips.is_empty()
        && (other_proxies || service.proxy_name.as_deref() == proxy_name)
        && is_path_component(&service.name.namespace)
        && is_path_component(&service.name.name)
}

/// Whether a slice is sent: if its endpoints can serve anything.
pub fn is_slice_sent(slice: &EndpointSlice) -> bool {
    !slice.headless && !slice.ports.is_empty() && is_path_component(&slice.name.name)
}

pub fn is_node_sent(name: &str) -> bool {
    is_path_component(name)
}

/// Whether a name can be part of a path: some clients crash on an additional pipe.
fn is_path_component(name: &str) -> bool {
    !name.contains(['|', '/'])
}

/// Encodes a Service. `trigger_time` is that of its slices, if it is to be sent.
pub fn service_info(object: &Service, trigger_time: Option<Timestamp>) -> ServiceInfo {
    let mut message = service(object);
    leave_out_untargeted(&mut message.ip_filters);
    for port in &mut message.ports {
        // Each brain decides this itself.
        port.has_any_endpoint = None;
    }
    message.labels.extend(label(PROXY_NAME, object.proxy_name.as_deref()));
    let mut info = ServiceInfo {
        hash: 0,
        service: Some(message),
        created: object.created.map(Timestamp::as_micros),
        trigger_time: trigger_time.map(Timestamp::as_micros),
    };
    info.hash = hash(&info);
    info
}

pub fn endpoint_info(slice: &EndpointSlice, endpoint: &Endpoint) -> EndpointInfo {
    let address = vec![endpoint.address.to_string()];
    let ips = match slice.family {
        Family::V4 => localv1::IpSet { v4: address, v6: Vec::new() },
        Family::V6 => localv1::IpSet { v4: Vec::new(), v6: address },
    };
    let ports = slice.ports.iter().map(|it| PortName {
        name: it.name.clone(),
        port: it.port.get().into(),
        protocol: protocol(it.protocol).into(),
        ..PortName::default()
    });
    let names = |it: &[std::sync::Arc<str>]| it.iter().map(ToString::to_string).collect();
    let mut info = EndpointInfo {
        hash: 0,
        namespace: slice.service.namespace.to_string(),
        source_name: slice.name.name.to_string(),
        service_name: slice.service.name.to_string(),
        endpoint: Some(localv1::Endpoint {
            hostname: endpoint.hostname.to_string(),
            ips: Some(ips),
            port_overrides: ports.collect(),
            // Each brain decides the scopes itself, but the field is required.
            scopes: Some(localv1::EndpointScopes::default()),
            ..localv1::Endpoint::default()
        }),
        conditions: Some(EndpointConditions {
            ready: endpoint.conditions.ready,
            serving: Some(endpoint.conditions.serving),
            terminating: Some(endpoint.conditions.terminating),
        }),
        pod_name: endpoint.pod.as_deref().unwrap_or_default().to_owned(),
        topology: Some(TopologyInfo {
            node: endpoint.node.as_deref().unwrap_or_default().to_owned(),
            zone: String::new(),
        }),
        hints: Some(TopologyHints {
            zones: names(endpoint.zone_hints()),
            nodes: names(endpoint.node_hints()),
        }),
    };
    info.hash = hash(&info);
    info
}

pub fn node_info(object: &Node) -> NodeInfo {
    let info = node(&object.name, &object.info);
    let message = globalv1::Node {
        name: object.name.to_string(),
        labels: label(ZONE, object.zone.as_deref()),
        topology: Some(TopologyInfo {
            node: object.name.to_string(),
            zone: object.zone.as_deref().unwrap_or_default().to_owned(),
        }),
        addresses: info.addresses,
        pod_cidrs: info.pod_cidrs,
        is_being_deleted: info.is_being_deleted,
        ..globalv1::Node::default()
    };
    let mut info = NodeInfo { hash: 0, node: Some(message) };
    info.hash = hash(&info);
    info
}

fn label(name: &str, value: Option<&str>) -> BTreeMap<String, String> {
    value.map(|it| (name.to_owned(), it.to_owned())).into_iter().collect()
}

/// The hash of a message whose field `hash` is 0.
fn hash(message: &impl Message) -> u64 {
    XxHash64::oneshot(0, &message.encode_to_vec())
}

/// The endpoints of a slice by their keys, which are their addresses. The order in the slice does not matter.
pub fn endpoints_by_key(slice: &EndpointSlice) -> BTreeMap<String, &Endpoint> {
    let mut sorted: Vec<_> = slice.endpoints.iter().collect();
    sorted.sort_unstable();
    sorted.dedup();
    let mut keys = BTreeMap::new();
    for same in sorted.chunk_by(|a, b| a.address == b.address) {
        for (position, it) in same.iter().enumerate() {
            let key = match position {
                0 => it.address.to_string(),
                // A slice should not list an address twice, but may.
                _ => format!("{}+{position}", it.address),
            };
            keys.insert(key, *it);
        }
    }
    keys
}
