//! Decodes the state of one Service from the messages of any brain.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
};

use ipnet::IpNet;
use model::{
    Family, NameForm, RequestedMetadata, ServiceName, Timestamp,
    address::{AddressUse, canonical_range},
    state::{
        ClientIpAffinity, Endpoint, EndpointKey, EndpointPort, PerFamily, PortTarget, Scopes, Service,
        ServiceKind, ServicePort, ServiceState, TargetPort, TrafficPolicy,
    },
};
use proxy_contract::localv1;

use crate::{
    encode::look_up_name,
    forwarding, load_balancing,
    reader::{Decoded, Reader, shown},
};

/// The default timeout of session affinity: three hours.
const DEFAULT_AFFINITY_SECONDS: NonZeroU32 = NonZeroU32::new(10_800).expect("it is not zero");

/// The limit of ports of a Service; no EndpointSlice has more.
const MAX_PORTS: usize = 20_000;

/// The state of one Service from its message and those of its endpoints, each with the last part of its path, with its labels
/// and annotations as far as they are requested.
///
/// None if the Service has no valid name, or no cluster IP.
pub fn service_state<'a>(
    message: &localv1::Service,
    endpoints: impl IntoIterator<Item = (&'a str, &'a localv1::Endpoint)>,
    requested: &RequestedMetadata,
) -> Decoded<Option<ServiceState>> {
    let mut reader = Reader::new(&format!("service {}/{}", message.namespace, message.name));
    let state = service(&mut reader, message, requested).map(|(service, positions)| {
        let endpoints = endpoints.into_iter();
        let mut endpoints: Vec<_> =
            endpoints.filter_map(|(key, it)| endpoint(&mut reader, key, it, &service, &positions)).collect();
        endpoints.sort_by(|a, b| a.key.cmp(&b.key));
        endpoints.dedup_by(|a, b| a.key == b.key);
        let trigger_time = message.trigger_time.map(Timestamp::from_micros);
        let mut targets = |field, of| targets(&mut reader, &message.ports, &positions, field, of).into();
        let other_serving = targets("ports.other_serving", |it| &it.other_serving);
        let not_serving = targets("ports.not_serving", |it| &it.not_serving);
        let forwarded = forwarding::decode(&mut reader, &message.ports, &positions);
        ServiceState {
            other_serving,
            not_serving,
            forwarded,
            trigger_time,
            ..ServiceState::new(service, endpoints)
        }
    });
    reader.finish(state)
}

/// For each port of a message its position in [`Service::ports`]; none if it was rejected.
pub(crate) type PortPositions = Vec<Option<u16>>;

pub(crate) fn service(
    reader: &mut Reader,
    message: &localv1::Service,
    requested: &RequestedMetadata,
) -> Option<(Service, PortPositions)> {
    let (namespace, name) = (message.namespace.as_str(), message.name.as_str());
    if !NameForm::DnsLabel.accepts(namespace) || !NameForm::DnsLabel.accepts(name) {
        let remedy = NameForm::DnsLabel.remedy();
        reader.reject("name", format!("the namespace or the name is invalid; {remedy}"));
        return None;
    }
    let ips = message.ips.clone().unwrap_or_default();
    let mut cluster_ips = reader.addresses("cluster_ips", ips.cluster_ips.as_ref(), AddressUse::Assigned);
    cluster_ips.dedup_by_key(|it| Family::of(*it));
    if ips.primary_v6 {
        cluster_ips.reverse();
    }
    if ips.headless || cluster_ips.is_empty() {
        return None;
    }
    let kind = match message.r#type.as_str() {
        "ExternalName" => return None,
        "NodePort" => ServiceKind::NodePort,
        "LoadBalancer" => ServiceKind::LoadBalancer,
        "ClusterIP" | "" => ServiceKind::ClusterIp,
        other => {
            reader.reject("type", format!("unknown type \"{}\"; ClusterIP is used", shown(other)));
            ServiceKind::ClusterIp
        }
    };
    let policy = |local| if local { TrafficPolicy::Local } else { TrafficPolicy::Cluster };
    let health = Some(message.health_check_node_port).filter(|it| *it != 0);
    let (ports, positions) = ports(reader, &message.ports);
    let set = ips.load_balancer_ips.as_ref();
    let mut load_balancer_ips = reader.addresses("load_balancer_ips", set, AddressUse::Endpoint);
    let mut external_ips = reader.addresses("external_ips", ips.external_ips.as_ref(), AddressUse::Endpoint);
    let filtered = [&mut load_balancer_ips, &mut external_ips];
    let source_ranges = source_ranges(reader, &message.ip_filters, filtered);
    let service = Service {
        kind,
        cluster_ips,
        external_ips,
        load_balancer_ips,
        ports,
        internal_policy: policy(message.internal_traffic_to_local),
        external_policy: policy(message.external_traffic_to_local),
        affinity: message.session_affinity.as_ref().map(affinity),
        load_balancing: message
            .load_balancing
            .map(|it| load_balancing::decode(reader, it))
            .unwrap_or_default(),
        source_ranges,
        health_check_node_port: health.and_then(|it| reader.port_number("health_check_node_port", it)),
        metadata: requested.select(&message.labels, &message.annotations, |field, name, reason| {
            reader.reject(field, format!("\"{}\": {reason}", shown(name)));
        }),
        ..Service::new(ServiceName::new(namespace, name))
    };
    Some((service, positions))
}

/// The source ranges, which are those of all load balancer IPs of a family. Where that is not so, or none of them can be read,
/// the load balancer IPs of the family are not served: they must not be open to others. Nor are external IPs that have a filter.
fn source_ranges(
    reader: &mut Reader,
    filters: &[localv1::IpFilter],
    [load_balancer_ips, external_ips]: [&mut Vec<IpAddr>; 2],
) -> Vec<IpNet> {
    let mut seen = BTreeSet::new();
    let texts = filters.iter().flat_map(|it| &it.source_ranges);
    let ranges = texts.filter_map(|it| reader.parse("ip_filters", it)).map(|it: IpNet| canonical_range(it));
    let mut ranges: Vec<_> = ranges.filter(|it| seen.insert(*it)).collect();
    ranges.sort_by_key(|it| it.addr().is_ipv6());
    let targets: Vec<_> = filters.iter().map(|it| addresses(it.target_ips.as_ref())).collect();
    for family in Family::ALL {
        let filters_of = |ip: &IpAddr| targets.iter().map(|it| it.contains(ip)).collect::<Vec<_>>();
        let own = load_balancer_ips.iter().filter(|it| Family::of(**it) == family);
        let filtered: BTreeSet<_> = own.map(filters_of).collect();
        let is_filtered = filtered.iter().flatten().any(|it| *it);
        let reason = if filtered.len() > 1 {
            "have different filters, and one list of ranges is supported"
        } else if is_filtered && !ranges.iter().any(|it| Family::of(it.addr()) == family) {
            "have a filter without a usable range of their family"
        } else {
            continue;
        };
        load_balancer_ips.retain(|it| Family::of(*it) != family);
        reader.reject("ip_filters", format!("the {family} load balancer IPs {reason}; they are not served"));
    }
    external_ips.retain(|ip| {
        let is_open = load_balancer_ips.contains(ip) || !targets.iter().any(|it| it.contains(ip));
        if !is_open {
            reader.reject("ip_filters", format!("the external IP {ip} has a filter; it is not served"));
        }
        is_open
    });
    ranges
}

/// The addresses of a set, as far as they can be read.
fn addresses(set: Option<&localv1::IpSet>) -> BTreeSet<IpAddr> {
    let texts = set.into_iter().flat_map(localv1::IpSet::iter);
    texts.filter_map(|it| it.parse().ok()).collect()
}

fn ports(reader: &mut Reader, messages: &[localv1::PortMapping]) -> (Vec<ServicePort>, PortPositions) {
    let mut ports: Vec<ServicePort> = Vec::new();
    let mut seen = BTreeSet::new();
    let mut positions = Vec::new();
    if messages.len() > MAX_PORTS {
        reader.reject("ports", format!("there are {}, and the first {MAX_PORTS} are used", messages.len()));
    }
    for message in messages.iter().take(MAX_PORTS) {
        let position = u16::try_from(ports.len()).ok();
        let port = port(reader, message).filter(|it| seen.insert((it.port, it.protocol)));
        positions.push(port.as_ref().and(position));
        ports.extend(port.filter(|_| position.is_some()));
    }
    (ports, positions)
}

fn port(reader: &mut Reader, message: &localv1::PortMapping) -> Option<ServicePort> {
    let protocol = reader.protocol("ports", message.protocol)?;
    let port = reader.port_number("ports", message.port)?;
    if !reader.accepts("ports.name", &message.name, NameForm::DnsLabel) {
        return None;
    }
    let target_name = reader.name("ports.target_port_name", &message.target_port_name, NameForm::PortName);
    let node_port = Some(message.node_port).filter(|it| *it != 0);
    let target_port = match (target_name, message.target_port) {
        (None, 0) => TargetPort::Number(port),
        (None, number) => TargetPort::Number(reader.port_number("ports", number).unwrap_or(port)),
        (Some(name), _) => TargetPort::Name(name.to_owned()),
    };
    // Absent means false: without a target, traffic to this port is rejected.
    let has_any_endpoint = message.has_any_endpoint.unwrap_or_default();
    let conflicting = message.conflicting_addresses.as_ref();
    Some(ServicePort {
        name: message.name.clone(),
        protocol,
        port,
        node_port: node_port.and_then(|it| reader.port_number("ports", it)),
        target_port,
        conflicting_addresses: reader.addresses(
            "ports.conflicting_addresses",
            conflicting,
            AddressUse::Assigned,
        ),
        has_any_endpoint: PerFamily { v4: has_any_endpoint.v4, v6: has_any_endpoint.v6 },
    })
}

/// The targets of a list of each port, in ascending order.
fn targets(
    reader: &mut Reader,
    ports: &[localv1::PortMapping],
    positions: &PortPositions,
    field: &'static str,
    of: fn(&localv1::PortMapping) -> &Vec<String>,
) -> Vec<PortTarget> {
    let mut found = Vec::new();
    for (message, position) in ports.iter().zip(positions) {
        let Some(index) = *position else { continue };
        let targets = of(message).iter().filter_map(|it| {
            let target: SocketAddr = reader.parse(field, it)?;
            let is_usable = reader.is_usable(field, target.ip(), AddressUse::Endpoint);
            is_usable.then_some(target)
        });
        found.extend(targets.map(|target| PortTarget { index, target }));
    }
    found.sort_unstable();
    found
}

/// None if it serves no port on this node.
fn endpoint(
    reader: &mut Reader,
    key: &str,
    message: &localv1::Endpoint,
    service: &Service,
    positions: &PortPositions,
) -> Option<Endpoint> {
    if !reader.accepts("endpoint", key, NameForm::Key) {
        return None;
    }
    let (v4, v6) = reader.endpoint_addresses(key, message.ips.as_ref());
    if v4.is_none() && v6.is_none() {
        return None;
    }
    let has_indices = message.port_overrides.iter().any(|it| it.index.is_some());
    let mut ports = if has_indices {
        ports_by_index(reader, message, positions)
    } else {
        ports_by_name(reader, message, service)
    };
    ports.retain(|it| !it.scopes.is_empty());
    ports.sort_by_key(|it| it.index);
    ports.dedup_by_key(|it| it.index);
    if ports.is_empty() {
        return None;
    }
    let hostname = reader.name("endpoint.hostname", &message.hostname, NameForm::DnsLabel);
    let is_pod = message.pod_name == key && !key.is_empty();
    Some(Endpoint {
        key: if is_pod { EndpointKey::Pod(key.into()) } else { EndpointKey::Anonymous(key.into()) },
        hostname: hostname.unwrap_or_default().into(),
        v4,
        v6,
        local: message.local,
        serving_terminating: message.serving_terminating,
        ports: ports.into(),
    })
}

/// The ports of an endpoint from our brain, which sends their positions in the Service.
fn ports_by_index(
    reader: &mut Reader,
    message: &localv1::Endpoint,
    positions: &PortPositions,
) -> Vec<EndpointPort> {
    let mut ports = Vec::new();
    for it in &message.port_overrides {
        let index = it.index.and_then(|it| usize::try_from(it).ok());
        let Some(index) = index.and_then(|it| positions.get(it).copied().flatten()) else { continue };
        let Some(port) = reader.port_number("endpoint", it.port) else { continue };
        ports.push(EndpointPort { index, port, scopes: scopes(it.scopes.or(message.scopes)) });
    }
    ports
}

/// The ports of an endpoint from KPNG's brain, which sends their names; a port without a name has the number of the
/// Service.
fn ports_by_name(reader: &mut Reader, message: &localv1::Endpoint, service: &Service) -> Vec<EndpointPort> {
    let mut ports = Vec::new();
    for (index, port) in (0_u16..).zip(&service.ports) {
        let name = look_up_name(&port.name, &port.target_port);
        let found = message.port_overrides.iter().find(|it| it.name == name);
        let target = match (found, &port.target_port) {
            (Some(found), _) => reader.port_number("endpoint", found.port),
            (None, TargetPort::Number(number)) if name.is_empty() => Some(*number),
            (None, _) => None,
        };
        let scopes = scopes(found.and_then(|it| it.scopes).or(message.scopes));
        ports.extend(target.map(|port| EndpointPort { index, port, scopes }));
    }
    ports
}

/// The scopes of an endpoint. A brain that does not send the scope `cluster` means every endpoint with any other scope.
fn scopes(message: Option<localv1::EndpointScopes>) -> Scopes {
    let it = message.unwrap_or_default();
    Scopes {
        internal: it.internal,
        external: it.external,
        cluster: it.cluster.unwrap_or(it.internal || it.external),
    }
}

fn affinity(message: &localv1::service::SessionAffinity) -> ClientIpAffinity {
    let localv1::service::SessionAffinity::ClientIp(it) = message;
    let seconds = u32::try_from(it.timeout_seconds).ok().and_then(NonZeroU32::new);
    ClientIpAffinity { timeout_seconds: seconds.unwrap_or(DEFAULT_AFFINITY_SECONDS) }
}

#[cfg(test)]
mod tests;
