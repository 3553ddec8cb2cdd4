//! Decodes the state of a cluster from the messages of any brain.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use model::{
    Family, NameForm, PerFamily, Rejections, RequestedMetadata, ServiceName, Timestamp,
    cluster::{
        ClusterState, Conditions, Endpoint, EndpointSlice, Hints, Node, Service, SliceName, SlicePort,
    },
    state::TargetPort,
};
use proxy_contract::{
    client::{ClusterChange, ClusterService},
    globalv1::{EndpointInfo, NodeInfo, TopologyHints},
    localv1,
};

use super::{PROXY_NAME, ZONE};
use crate::{
    decode,
    encode::look_up_name,
    node,
    reader::{Decoded, Reader, apply_kind},
};

#[derive(Debug, Default)]
pub struct ClusterDecoder {
    requested: RequestedMetadata,
    cluster: Arc<ClusterState>,
    services: BTreeMap<Arc<str>, DecodedService>,
    /// The rejected parts of the messages.
    pub rejections: Rejections,
}

/// The objects that the message of a Service contained.
#[derive(Debug)]
struct DecodedService {
    service: Option<ServiceName>,
    slices: Vec<SliceName>,
}

impl ClusterDecoder {
    /// A decoder that keeps the requested labels and annotations of Services; the default one keeps none.
    pub fn new(requested: RequestedMetadata) -> Self {
        Self { requested, ..Self::default() }
    }

    /// Applies a change and returns the state after it. The cost is proportional to the change.
    pub fn apply(&mut self, change: &ClusterChange) -> Arc<ClusterState> {
        let (own, rejections) = (&mut self.cluster, &mut self.rejections);
        apply_kind(&change.nodes, "node", rejections, decode_node, |name, it| match it {
            Some(it) => drop(Arc::make_mut(own).nodes.insert(it)),
            None => drop(Arc::make_mut(own).nodes.remove(name)),
        });
        let cidrs = &change.service_cidrs;
        apply_kind(cidrs, "service CIDR", rejections, node::decode_service_cidr, |name, it| match it {
            Some(it) => Arc::make_mut(own).set_service_cidr(it),
            None => Arc::make_mut(own).delete_service_cidr(name),
        });
        apply_kind(&change.pods, "pod", rejections, node::decode_pod, |name, it| match it {
            Some(it) => Arc::make_mut(own).set_pod(it),
            None => Arc::make_mut(own).delete_pod(name),
        });
        // A slice that moves to another Service is deleted before it is set.
        let (gone, set): (Vec<_>, Vec<_>) = change.services.iter().partition(|(_, it)| it.is_none());
        for (path, message) in gone.into_iter().chain(set) {
            let decoded = message.as_ref().map(|it| service_with_slices(it, &self.requested));
            let Decoded { value, rejected } = decoded.unwrap_or_default();
            self.rejections.set(&format!("service {path}"), rejected);
            let (service, slices) = value.unzip();
            let slices: Vec<EndpointSlice> = slices.unwrap_or_default();
            let decoded = message.is_some().then(|| DecodedService {
                service: service.as_ref().map(|it: &Service| it.name.clone()),
                slices: slices.iter().map(|it| it.name.clone()).collect(),
            });
            let before = match decoded {
                Some(it) => self.services.insert(Arc::clone(path), it),
                None => self.services.remove(path),
            };
            self.replace(service, slices, before);
        }
        Arc::clone(&self.cluster)
    }

    /// Replaces what a message contained before by a Service and its slices.
    fn replace(
        &mut self,
        service: Option<Service>,
        slices: Vec<EndpointSlice>,
        before: Option<DecodedService>,
    ) {
        let cluster = Arc::make_mut(&mut self.cluster);
        if let Some(before) = before {
            for name in before.slices.iter().filter(|name| slices.iter().all(|it| it.name != **name)) {
                // The slice may have moved to another Service.
                let owner = cluster.slice(name).map(|it| &it.service);
                if owner.is_some() && owner == before.service.as_ref() {
                    cluster.delete_slice(name);
                }
            }
            if service.is_none()
                && let Some(name) = &before.service
            {
                cluster.services.remove(name);
            }
        }
        // An equal object is kept, so that nothing is derived from it again.
        for slice in slices {
            if cluster.slice(&slice.name).is_none_or(|it| **it != slice) {
                cluster.set_slice(slice);
            }
        }
        if let Some(service) = service
            && cluster.services.get(&service.name).is_none_or(|it| **it != service)
        {
            cluster.services.insert(service);
        }
    }
}

fn decode_node(name: &Arc<str>, message: &NodeInfo) -> Decoded<Option<Node>> {
    let mut reader = Reader::new(&format!("node {name}"));
    let is_named = reader.accepts("name", name, NameForm::DnsSubdomain);
    let empty = Default::default();
    let message = message.node.as_ref().unwrap_or(&empty);
    let topology = message.topology.as_ref().map(|it| &it.zone).filter(|it| !it.is_empty());
    let zone = topology.or_else(|| message.labels.get(ZONE));
    let zone = zone.and_then(|it| reader.name("zone", it, NameForm::LabelValue)).map(Arc::from);
    let info = node::node_info(&mut reader, &message.addresses, &message.pod_cidrs, message.is_being_deleted);
    reader.finish(is_named.then(|| Node { name: Arc::clone(name), zone, info }))
}

/// A Service with its slices, and with its labels and annotations as far as they are requested; none if it cannot be served.
pub fn service_with_slices(
    message: &ClusterService,
    requested: &RequestedMetadata,
) -> Decoded<Option<(Service, Vec<EndpointSlice>)>> {
    let empty = Default::default();
    let body = message.service.service.as_ref().unwrap_or(&empty);
    let mut reader = Reader::new(&format!("service {}/{}", body.namespace, body.name));
    let value = service(message, body, requested, &mut reader).map(|service| {
        let trigger_time = message.service.trigger_time.map(Timestamp::from_micros);
        let slices = slices(message, &service, trigger_time, &mut reader);
        (service, slices)
    });
    reader.finish(value)
}

fn service(
    message: &ClusterService,
    body: &localv1::Service,
    requested: &RequestedMetadata,
    reader: &mut Reader,
) -> Option<Service> {
    // Endpoints without a Service are ignored.
    message.service.service.as_ref()?;
    let proxy_name = body.labels.get(PROXY_NAME);
    if !proxy_name.is_none_or(|it| reader.accepts("labels", it, NameForm::LabelValue)) {
        return None;
    }
    let (mut service, _) = decode::service(reader, body, requested)?;
    // Each brain decides conflicts and endpoints itself.
    for port in &mut service.ports {
        port.conflicting_addresses = Vec::new();
        port.has_any_endpoint = PerFamily::default();
    }
    let created = message.service.created.map(Timestamp::from_micros);
    Some(Service { created, proxy_name: proxy_name.cloned(), ..service })
}

fn slices(
    message: &ClusterService,
    service: &Service,
    trigger_time: Option<Timestamp>,
    reader: &mut Reader,
) -> Vec<EndpointSlice> {
    // Our brain sends the same ports with all endpoints of a slice; other brains need not.
    let mut groups: BTreeMap<(&str, Family, Vec<SlicePort>), Vec<Endpoint>> = BTreeMap::new();
    for (key, it) in &message.endpoints {
        // The name of a slice, which the API calls any.
        if !reader.accepts("endpoint.source_name", &it.source_name, NameForm::Key) {
            continue;
        }
        let ports = ports(it, service, reader);
        let ips = it.endpoint.as_ref().and_then(|it| it.ips.as_ref());
        let (v4, v6) = reader.endpoint_addresses(key, ips);
        for address in v4.map(IpAddr::V4).into_iter().chain(v6.map(IpAddr::V6)) {
            let group = (it.source_name.as_str(), Family::of(address), ports.clone());
            groups.entry(group).or_default().push(endpoint(it, address, reader));
        }
    }
    let name = |name: String| SliceName { namespace: Arc::clone(&service.name.namespace), name: name.into() };
    if groups.is_empty() && trigger_time.is_some() {
        // The last endpoint was removed, which is a change as well. No slice of a cluster has such a name.
        return vec![EndpointSlice {
            trigger_time,
            ..EndpointSlice::new(name(format!("{}+", service.name.name)), service.name.clone(), Family::V4)
        }];
    }
    let mut names = BTreeMap::<&str, usize>::new();
    let slices = groups.into_iter().map(|((source, family, ports), mut endpoints)| {
        let count = names.entry(source).or_default();
        let name = name(if *count == 0 { source.to_owned() } else { format!("{source}+{count}") });
        *count += 1;
        endpoints.shrink_to_fit();
        EndpointSlice {
            ports,
            endpoints,
            trigger_time,
            ..EndpointSlice::new(name, service.name.clone(), family)
        }
    });
    slices.collect()
}

fn endpoint(message: &EndpointInfo, address: IpAddr, reader: &mut Reader) -> Endpoint {
    let mut name = |field, it, form| reader.name(field, it, form).map(Arc::from);
    let node = message
        .topology
        .as_ref()
        .and_then(|it| name("endpoint.topology.node", &it.node, NameForm::DnsSubdomain));
    let pod = name("endpoint.pod_name", &message.pod_name, NameForm::DnsSubdomain);
    let hostname = message.endpoint.as_ref().map(|it| it.hostname.as_str()).unwrap_or_default();
    let hostname = reader.name("endpoint.hostname", hostname, NameForm::DnsLabel);
    let mut names = |it: &[String], form| {
        let names = it.iter().filter_map(|it| reader.name("endpoint.hints", it, form));
        let mut names: Vec<Arc<str>> = names.map(Arc::from).collect();
        names.sort();
        names
    };
    let TopologyHints { zones, nodes } = message.hints.clone().unwrap_or_default();
    let hints =
        Hints { nodes: names(&nodes, NameForm::DnsSubdomain), zones: names(&zones, NameForm::QualifiedName) };
    // Absent conditions have the defaults of Kubernetes.
    let conditions = message.conditions;
    Endpoint {
        address,
        conditions: Conditions {
            ready: conditions.is_none_or(|it| it.ready),
            serving: conditions.and_then(|it| it.serving).unwrap_or(true),
            terminating: conditions.and_then(|it| it.terminating).unwrap_or(false),
        },
        node,
        pod,
        hostname: hostname.unwrap_or_default().into(),
        hints: hints.of_endpoint(),
    }
}

fn ports(message: &EndpointInfo, service: &Service, reader: &mut Reader) -> Vec<SlicePort> {
    let overrides = message.endpoint.as_ref().map(|it| it.port_overrides.as_slice()).unwrap_or_default();
    let has_protocol = |it: &localv1::PortName| it.protocol != i32::from(localv1::Protocol::UnknownProtocol);
    if !overrides.is_empty() && overrides.iter().all(has_protocol) {
        let ports = overrides.iter().filter_map(|it| {
            let protocol = reader.protocol("endpoint", it.protocol)?;
            if !reader.accepts("endpoint.port_overrides", &it.name, NameForm::DnsLabel) {
                return None;
            }
            Some(SlicePort {
                name: it.name.clone(),
                protocol,
                port: reader.port_number("endpoint", it.port)?,
            })
        });
        return ports.collect();
    }
    // KPNG's brain sends names; a port without a name has the number of the Service.
    let ports = service.ports.iter().filter_map(|port| {
        let target_name = look_up_name(&port.name, &port.target_port);
        let named = |name: &str| overrides.iter().find(|it| it.name == name);
        let number = match (named(target_name).or_else(|| named(&port.name)), &port.target_port) {
            (Some(it), _) => reader.port_number("endpoint", it.port)?,
            (None, TargetPort::Number(number)) if target_name.is_empty() => *number,
            (None, _) => return None,
        };
        Some(SlicePort { name: port.name.clone(), protocol: port.protocol, port: number })
    });
    ports.collect()
}
