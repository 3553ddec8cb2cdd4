//! Messages to facts, whoever has written them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    num::NonZeroU16,
    sync::Arc,
};

use model::{
    Family, Protocol, Rejected, ServiceName, Timestamp,
    cluster::{
        ClusterState, Conditions, Endpoint, EndpointSlice, Node, Service, ServicePort, SliceName, SlicePort,
    },
    state::TargetPort,
};
use proxy_contract::{
    client::{Cluster, ClusterService},
    globalv1::{EndpointInfo, NodeInfo, TopologyHints},
    localv1,
};

use super::{PROXY_NAME, ZONE};
use crate::{
    Decoded,
    decode::{Reader, shown},
    node,
};

/// The facts of a cluster from one state after the other; what is the same message again is not decoded again.
#[derive(Debug, Default)]
pub struct ClusterDecoder {
    facts: Arc<ClusterState>,
    nodes: BTreeMap<Arc<str>, (Arc<NodeInfo>, Vec<Rejected>)>,
    services: BTreeMap<Arc<str>, Known>,
    said: BTreeSet<Rejected>,
}

#[derive(Debug)]
struct Known {
    message: Arc<ClusterService>,
    service: Option<ServiceName>,
    slices: Vec<SliceName>,
    rejected: Vec<Rejected>,
}

impl ClusterDecoder {
    /// The facts; says in the log what was refused, if it has not said so before.
    pub fn decode(&mut self, cluster: &Cluster) -> Arc<ClusterState> {
        self.nodes(cluster);
        let gone: Vec<_> =
            self.services.keys().filter(|it| !cluster.services.contains_key(*it)).cloned().collect();
        for path in gone {
            if let Some(before) = self.services.remove(&path) {
                self.take_over(None, Vec::new(), Some(before));
            }
        }
        for (path, message) in &cluster.services {
            if self.services.get(path).is_some_and(|it| Arc::ptr_eq(&it.message, message)) {
                continue;
            }
            let Decoded { value, rejected } = service_with_slices(message);
            let (service, slices) = value.unzip();
            let slices = slices.unwrap_or_default();
            let known = Known {
                message: Arc::clone(message),
                service: service.as_ref().map(|it: &Service| it.name.clone()),
                slices: slices.iter().map(|it: &EndpointSlice| it.name.clone()).collect(),
                rejected,
            };
            let before = self.services.insert(Arc::clone(path), known);
            self.take_over(service, slices, before);
        }
        let of_nodes = self.nodes.values().flat_map(|(_, rejected)| rejected);
        let of_services = self.services.values().flat_map(|it| &it.rejected);
        let refused: BTreeSet<_> = of_nodes.chain(of_services).cloned().collect();
        for it in refused.difference(&self.said) {
            tracing::warn!("not taken over from the brain: {it}");
        }
        self.said = refused;
        Arc::clone(&self.facts)
    }

    /// Puts a Service and its slices in the place of what was there before.
    fn take_over(&mut self, service: Option<Service>, slices: Vec<EndpointSlice>, before: Option<Known>) {
        let facts = Arc::make_mut(&mut self.facts);
        if let Some(before) = before {
            for name in before.slices.iter().filter(|name| slices.iter().all(|it| it.name != **name)) {
                // Another Service may have it by now.
                let owner = facts.slice(name).map(|it| &it.service);
                if owner.is_some() && owner == before.service.as_ref() {
                    facts.delete_slice(name);
                }
            }
            if service.is_none()
                && let Some(name) = &before.service
            {
                facts.delete_service(name);
            }
        }
        // What is equal stays the same object, so that nothing is derived from it again.
        for slice in slices {
            if facts.slice(&slice.name).is_none_or(|it| **it != slice) {
                facts.set_slice(slice);
            }
        }
        if let Some(service) = service
            && facts.service(&service.name).is_none_or(|it| **it != service)
        {
            facts.set_service(service);
        }
    }

    fn nodes(&mut self, cluster: &Cluster) {
        let gone: Vec<_> = self.nodes.keys().filter(|it| !cluster.nodes.contains_key(*it)).cloned().collect();
        for name in gone {
            self.nodes.remove(&name);
            Arc::make_mut(&mut self.facts).delete_node(&name);
        }
        for (name, message) in &cluster.nodes {
            if !self.nodes.get(name).is_some_and(|(it, _)| Arc::ptr_eq(it, message)) {
                let Decoded { value, rejected } = node_fact(name, message);
                Arc::make_mut(&mut self.facts).set_node(value);
                self.nodes.insert(Arc::clone(name), (Arc::clone(message), rejected));
            }
        }
    }
}

fn node_fact(name: &Arc<str>, message: &NodeInfo) -> Decoded<Node> {
    let mut reader = Reader::new(format!("node {name}"));
    let nothing = Default::default();
    let message = message.node.as_ref().unwrap_or(&nothing);
    let topology = message.topology.as_ref().map(|it| &it.zone).filter(|it| !it.is_empty());
    let zone = topology.or_else(|| message.labels.get(ZONE)).filter(|it| !it.is_empty());
    let info = node::read(&mut reader, &message.addresses, &message.pod_cidrs, message.is_being_deleted);
    let value = Node { name: Arc::clone(name), zone: zone.map(|it| it.as_str().into()), info };
    Decoded { value, rejected: reader.into_rejected() }
}

/// A Service with its slices; none if it could not be served.
pub fn service_with_slices(message: &ClusterService) -> Decoded<Option<(Service, Vec<EndpointSlice>)>> {
    let nothing = Default::default();
    let said = message.service.service.as_ref().unwrap_or(&nothing);
    let mut reader = Reader::new(format!("service {}/{}", said.namespace, said.name));
    let value = service(message, said, &mut reader).map(|service| {
        let trigger_time = message.service.trigger_time.map(Timestamp::from_micros);
        let slices = slices(message, &service, trigger_time, &mut reader);
        (service, slices)
    });
    Decoded { value, rejected: reader.into_rejected() }
}

fn service(message: &ClusterService, said: &localv1::Service, reader: &mut Reader) -> Option<Service> {
    // Endpoints whose Service is not there have nobody to refuse them.
    message.service.service.as_ref()?;
    let (service, _) = reader.service(said)?;
    let ports = service.ports.into_iter().map(|it| ServicePort {
        name: it.name,
        protocol: it.protocol,
        port: it.port,
        node_port: it.node_port,
        target_port: it.target_port,
    });
    Some(Service {
        name: service.name,
        created: message.service.created.map(Timestamp::from_micros),
        kind: Some(service.kind),
        proxy_name: said.labels.get(PROXY_NAME).cloned(),
        cluster_ips: service.cluster_ips,
        external_ips: service.external_ips,
        load_balancer_ips: service.load_balancer_ips,
        ports: ports.collect(),
        internal_policy: service.internal_policy,
        external_policy: service.external_policy,
        affinity: service.affinity,
        source_ranges: service.source_ranges,
        health_check_node_port: service.health_check_node_port,
    })
}

type Ports = Vec<(String, Protocol, NonZeroU16)>;

fn slices(
    message: &ClusterService,
    service: &Service,
    trigger_time: Option<Timestamp>,
    reader: &mut Reader,
) -> Vec<EndpointSlice> {
    // From our brain, all endpoints of a slice are alike here.
    let mut alike: BTreeMap<(&str, Family, Ports), Vec<Endpoint>> = BTreeMap::new();
    for (key, it) in &message.endpoints {
        let ports = ports(it, service, reader);
        let addresses = addresses(key, it, reader);
        for address in addresses {
            let family = Family::of(address);
            let place = (it.source_name.as_str(), family, ports.clone());
            alike.entry(place).or_default().push(endpoint(it, address));
        }
    }
    let name = |name: String| SliceName { namespace: Arc::clone(&service.name.namespace), name: name.into() };
    if alike.is_empty() && trigger_time.is_some() {
        // The last endpoint has gone, and that was a change, too. No slice of a cluster is called so.
        return vec![EndpointSlice {
            name: name(format!("{}+", service.name.name)),
            service: service.name.clone(),
            headless: false,
            family: Family::V4,
            ports: Vec::new(),
            endpoints: Vec::new(),
            trigger_time,
        }];
    }
    let mut names = BTreeMap::<&str, usize>::new();
    let slices = alike.into_iter().map(|((source, family, ports), mut endpoints)| {
        let count = names.entry(source).or_default();
        let name = name(if *count == 0 { source.to_owned() } else { format!("{source}+{count}") });
        *count += 1;
        endpoints.shrink_to_fit();
        let port = |(name, protocol, port)| SlicePort { name, protocol, port };
        EndpointSlice {
            name,
            service: service.name.clone(),
            headless: false,
            family,
            ports: ports.into_iter().map(port).collect(),
            endpoints,
            trigger_time,
        }
    });
    slices.collect()
}

/// The first address of each family.
fn addresses(key: &str, message: &EndpointInfo, reader: &mut Reader) -> Vec<IpAddr> {
    let ips = message.endpoint.as_ref().and_then(|it| it.ips.clone()).unwrap_or_default();
    let v4 = reader.v4("endpoint", &ips).first().copied().map(IpAddr::V4);
    let v6 = reader.v6("endpoint", &ips).first().copied().map(IpAddr::V6);
    if v4.is_none() && v6.is_none() {
        reader.refuse("endpoint", format!("{} has no address; the peer should send one", shown(key)));
    }
    v4.into_iter().chain(v6).collect()
}

fn endpoint(message: &EndpointInfo, address: IpAddr) -> Endpoint {
    let name = |it: &str| Some(it).filter(|it| !it.is_empty()).map(Arc::from);
    let names = |it: &[String]| {
        let mut names: Vec<Arc<str>> = it.iter().map(|it| it.as_str().into()).collect();
        names.sort();
        names
    };
    let TopologyHints { zones, nodes } = message.hints.clone().unwrap_or_default();
    // A condition that is not said is what Kubernetes takes it to be.
    let conditions = message.conditions;
    Endpoint {
        address,
        conditions: Conditions {
            ready: conditions.is_none_or(|it| it.ready),
            serving: conditions.and_then(|it| it.serving).unwrap_or(true),
            terminating: conditions.and_then(|it| it.terminating).unwrap_or(false),
        },
        node: message.topology.as_ref().and_then(|it| name(&it.node)),
        // It becomes part of a path.
        pod: name(&message.pod_name).filter(|it| !it.contains(['/', '|'])),
        hostname: message.endpoint.as_ref().map(|it| it.hostname.clone()).unwrap_or_default(),
        node_hints: names(&nodes),
        zone_hints: names(&zones),
    }
}

/// The ports that an endpoint listens on.
fn ports(message: &EndpointInfo, service: &Service, reader: &mut Reader) -> Ports {
    let overrides = message.endpoint.as_ref().map(|it| it.port_overrides.as_slice()).unwrap_or_default();
    let is_ours = |it: &localv1::PortName| it.protocol != i32::from(localv1::Protocol::UnknownProtocol);
    if !overrides.is_empty() && overrides.iter().all(is_ours) {
        let said = overrides.iter().filter_map(|it| {
            let protocol = reader.protocol("endpoint", it.protocol)?;
            Some((it.name.clone(), protocol, reader.port_number("endpoint", it.port)?))
        });
        return said.collect();
    }
    // KPNG's: by name, or the Service's own number where there is none.
    let said = service.ports.iter().filter_map(|port| {
        let target_name = match &port.target_port {
            TargetPort::Name(name) if port.name.is_empty() => name.as_str(),
            _ => port.name.as_str(),
        };
        let named = |name: &str| overrides.iter().find(|it| it.name == name);
        let number = match (named(target_name).or_else(|| named(&port.name)), &port.target_port) {
            (Some(it), _) => reader.port_number("endpoint", it.port)?,
            (None, TargetPort::Number(number)) if target_name.is_empty() => *number,
            (None, _) => return None,
        };
        Some((port.name.clone(), port.protocol, number))
    });
    said.collect()
}
