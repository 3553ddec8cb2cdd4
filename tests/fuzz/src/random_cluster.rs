//! Random Services, slices and nodes that get in the way of each other, made of arbitrary bytes.
//! Only bytes that do not suffice are an error.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    num::{NonZeroU8, NonZeroU16, NonZeroU32},
    sync::Arc,
};

use arbitrary::{Result, Unstructured};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use model::{
    Family, Protocol, ServiceName, Timestamp,
    cluster::{
        ClusterState, Conditions, Endpoint, EndpointSlice, Hints, Node, Object, ObjectName, Service,
        SliceName, SlicePort,
    },
    state::{
        self, Algorithm, ClientIpAffinity, ExternalForwarding, LoadBalancing, Memo, PassiveHealth,
        ServiceKind, ServicePort, TargetPort, TrafficPolicy,
    },
};

pub const NODES: [&str; 3] = ["n1", "n2", "n3"];
const ZONES: [&str; 2] = ["a", "b"];
/// One is the beginning of another.
const SERVICES: [&str; 3] = ["web", "web-b", "api"];
const PORT_NAMES: [&str; 3] = ["", "http", "dns"];

/// A change of one object: its newest version, or `None` if it was deleted.
pub type Change = (ObjectName, Option<Object>);

pub fn change(u: &mut Unstructured<'_>) -> Result<Change> {
    let kind = u.int_in_range(0..=11)?;
    change_of(kind, u)
}

/// Makes random changes, as many as the bytes suffice for.
pub fn apply_changes(cluster: &mut ClusterState, bytes: &[u8]) {
    let mut u = Unstructured::new(bytes);
    while let (false, Ok(change)) = (u.is_empty(), change(&mut u)) {
        cluster.apply([change].into());
    }
}

/// A random change of a kind from 0 to 11; slices change most often.
pub(crate) fn change_of(kind: u8, u: &mut Unstructured<'_>) -> Result<Change> {
    Ok(match kind {
        0..=2 => set(Object::Service(service(u)?.into())),
        3 => (ObjectName::Service(service_name(u)?), None),
        4..=8 => set(Object::EndpointSlice(slice(u)?.into())),
        9 => (ObjectName::EndpointSlice(slice_name(u)?), None),
        10 => set(Object::Node(node(u)?.into())),
        _ => (ObjectName::Node(Arc::from(*u.choose(&NODES)?)), None),
    })
}

fn set(object: Object) -> Change {
    (object.name(), Some(object))
}

fn service_name(u: &mut Unstructured<'_>) -> Result<ServiceName> {
    Ok(ServiceName::new("ns", *u.choose(&SERVICES)?))
}

fn slice_name(u: &mut Unstructured<'_>) -> Result<SliceName> {
    let index = u.int_in_range(0..=4)?;
    Ok(SliceName { namespace: "ns".into(), name: format!("slice-{index}").into() })
}

fn number(u: &mut Unstructured<'_>, numbers: &[u16]) -> Result<NonZeroU16> {
    Ok(NonZeroU16::new(*u.choose(numbers)?).unwrap_or(NonZeroU16::MIN))
}

fn protocol(u: &mut Unstructured<'_>) -> Result<Protocol> {
    u.choose(&[Protocol::Tcp, Protocol::Udp, Protocol::Sctp]).copied()
}

fn address(u: &mut Unstructured<'_>, family: Family) -> Result<IpAddr> {
    let last = u.int_in_range(1..=6)?;
    Ok(match family {
        Family::V4 => Ipv4Addr::new(10, 1, 0, last).into(),
        Family::V6 => Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last.into()).into(),
    })
}

/// Up to two addresses, which other Services may have too.
fn addresses(u: &mut Unstructured<'_>) -> Result<Vec<IpAddr>> {
    let mut addresses = Vec::new();
    for _ in 0..u.int_in_range(0..=2)? {
        let family = family(u)?;
        let it = address(u, family)?;
        if !addresses.contains(&it) {
            addresses.push(it);
        }
    }
    Ok(addresses)
}

fn family(u: &mut Unstructured<'_>) -> Result<Family> {
    u.choose(&[Family::V4, Family::V6]).copied()
}

fn policy(u: &mut Unstructured<'_>) -> Result<TrafficPolicy> {
    u.choose(&[TrafficPolicy::Cluster, TrafficPolicy::Local]).copied()
}

fn time(u: &mut Unstructured<'_>) -> Result<Option<Timestamp>> {
    Ok(if u.arbitrary()? { Some(Timestamp::from_micros(u.int_in_range(0..=3)?)) } else { None })
}

/// A Service that other Services may be in conflict with.
pub fn service(u: &mut Unstructured<'_>) -> Result<Service> {
    use ServiceKind::{ClusterIp, ExternalName, LoadBalancer, NodePort};
    let mut cluster_ips = addresses(u)?;
    cluster_ips.dedup_by_key(|it| Family::of(*it));
    let mut ports: Vec<ServicePort> = Vec::new();
    for _ in 0..u.int_in_range(0..=3)? {
        let (name, protocol, port) = (u.choose(&PORT_NAMES)?, protocol(u)?, number(u, &[53, 80])?);
        let port = ServicePort {
            name: (*name).to_owned(),
            node_port: if u.ratio(1, 3)? { Some(number(u, &[30_000, 30_001])?) } else { None },
            target_port: if u.arbitrary()? {
                TargetPort::Number(number(u, &[8080, 8081])?)
            } else {
                TargetPort::Name("web".to_owned())
            },
            ..ServicePort::new(protocol, port)
        };
        if !ports.iter().any(|it| (it.port, it.protocol) == (port.port, port.protocol)) {
            ports.push(port);
        }
    }
    Ok(Service {
        name: service_name(u)?,
        created: time(u)?,
        kind: *u.choose(&[ExternalName, ClusterIp, NodePort, LoadBalancer])?,
        proxy_name: u.ratio(1, 8)?.then(|| "mesh".to_owned()),
        cluster_ips,
        external_ips: addresses(u)?,
        load_balancer_ips: addresses(u)?,
        ports,
        internal_policy: policy(u)?,
        external_policy: policy(u)?,
        affinity: u.ratio(1, 4)?.then_some(ClientIpAffinity { timeout_seconds: NonZeroU32::MIN }),
        source_ranges: if u.ratio(1, 4)? { ranges() } else { Vec::new() },
        health_check_node_port: if u.ratio(1, 4)? { NonZeroU16::new(30_999) } else { None },
        load_balancing: load_balancing(u)?,
        metadata: None,
    })
}

fn load_balancing(u: &mut Unstructured<'_>) -> Result<LoadBalancing> {
    let passive_health = PassiveHealth {
        enabled: u.arbitrary()?,
        failures: NonZeroU8::new(u.int_in_range(0..=3)?),
        max_ejected_percent: NonZeroU8::new(*u.choose(&[0, 50])?),
    };
    Ok(LoadBalancing {
        algorithm: *u.choose(&[Algorithm::Random, Algorithm::LeastConnections])?,
        passive_health,
        slow_start: NonZeroU16::new(*u.choose(&[0, 30])?),
        drain: NonZeroU32::new(*u.choose(&[0, 30])?),
        udp_to_packets: u.ratio(1, 4)?,
        external_forwarding: *u.choose(&[
            None,
            Some(ExternalForwarding::Nat),
            Some(ExternalForwarding::Dsr),
        ])?,
    })
}

fn ranges() -> Vec<IpNet> {
    let v4 = Ipv4Net::new_assert(Ipv4Addr::new(10, 1, 0, 0), 16).into();
    vec![Ipv6Net::new_assert(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0), 8).into(), v4]
}

fn names(u: &mut Unstructured<'_>, names: &[&str]) -> Result<Vec<Arc<str>>> {
    let mut chosen = Vec::new();
    for it in names {
        if u.ratio(1, 4)? {
            chosen.push(Arc::from(*it));
        }
    }
    Ok(chosen)
}

/// An EndpointSlice of one of the Services.
pub fn slice(u: &mut Unstructured<'_>) -> Result<EndpointSlice> {
    let family = family(u)?;
    let mut ports = Vec::new();
    for _ in 0..u.int_in_range(0..=2)? {
        let name = (*u.choose(&PORT_NAMES)?).to_owned();
        ports.push(SlicePort { name, protocol: protocol(u)?, port: number(u, &[8080, 8081])? });
    }
    let mut endpoints = Vec::new();
    for _ in 0..u.int_in_range(0..=4)? {
        endpoints.push(endpoint(u, family)?);
    }
    Ok(EndpointSlice {
        name: slice_name(u)?,
        service: service_name(u)?,
        headless: u.ratio(1, 8)?,
        family,
        ports,
        endpoints,
        trigger_time: time(u)?,
        memo: Memo::default(),
    })
}

fn endpoint(u: &mut Unstructured<'_>, family: Family) -> Result<Endpoint> {
    let [ready, serving, terminating] = [u.ratio(2, 3)?, u.ratio(2, 3)?, u.ratio(1, 3)?];
    Ok(Endpoint {
        address: address(u, family)?,
        conditions: Conditions { ready, serving, terminating },
        node: if u.ratio(3, 4)? { Some(Arc::from(*u.choose(&NODES)?)) } else { None },
        pod: if u.ratio(3, 4)? { Some(format!("p{}", u.int_in_range(0..=3)?).into()) } else { None },
        hostname: if u.ratio(1, 8)? { "host".into() } else { Box::default() },
        hints: Hints { nodes: names(u, &NODES)?, zones: names(u, &ZONES)? }.of_endpoint(),
    })
}

/// A dual-stack Service over TCP and UDP that is served, and three slices that have all of its ports, without hints for nodes.
pub(crate) fn service_with_slices(u: &mut Unstructured<'_>) -> Result<(Service, Vec<EndpointSlice>)> {
    let name = ServiceName::new("ns", SERVICES[0]);
    let target = NonZeroU16::MIN;
    let ports = [(PORT_NAMES[1], Protocol::Tcp), (PORT_NAMES[2], Protocol::Udp)];
    let service_port = |(name, protocol): (&str, Protocol)| ServicePort {
        name: name.to_owned(),
        ..ServicePort::new(protocol, target)
    };
    let service = Service {
        cluster_ips: vec![
            Ipv4Addr::new(10, 96, 0, 1).into(),
            Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, 1).into(),
        ],
        external_ips: addresses(u)?,
        ports: ports.map(service_port).into(),
        internal_policy: policy(u)?,
        external_policy: policy(u)?,
        load_balancing: load_balancing(u)?,
        ..Service::new(name.clone())
    };
    let (mut slices, has_zones) = (Vec::new(), u.arbitrary()?);
    for (n, family) in (0..).zip([Family::V4, Family::V4, Family::V6]) {
        let slice_name = SliceName { namespace: "ns".into(), name: format!("slice-{n}").into() };
        let mut slice = EndpointSlice {
            ports: ports
                .map(|(name, protocol)| SlicePort { name: name.to_owned(), protocol, port: target })
                .into(),
            ..EndpointSlice::new(slice_name, name.clone(), family)
        };
        for _ in 0..u.int_in_range(1..=4)? {
            slice.endpoints.push(endpoint(u, family)?);
        }
        make_plain(&mut slice, has_zones, u)?;
        slices.push(slice);
    }
    Ok((service, slices))
}

/// What is ready is not terminating, and hints are for zones, if there are any.
fn make_plain(slice: &mut EndpointSlice, has_zones: bool, u: &mut Unstructured<'_>) -> Result<()> {
    for it in &mut slice.endpoints {
        let zones = if has_zones { it.zone_hints().to_vec() } else { Vec::new() };
        // Most often each has one, as a controller gives them.
        let zones = if zones.is_empty() && has_zones { vec![Arc::from(*u.choose(&ZONES)?)] } else { zones };
        it.hints = Hints { zones, ..Hints::default() }.of_endpoint();
        it.conditions.terminating &= !it.conditions.ready;
    }
    Ok(())
}

/// The slice after up to two endpoints have come, gone or changed; often none of it has hints for nodes.
pub(crate) fn with_other_endpoints(slice: &EndpointSlice, u: &mut Unstructured<'_>) -> Result<EndpointSlice> {
    let mut slice = slice.clone();
    let has_zones = slice.endpoints.iter().any(|it| !it.zone_hints().is_empty()) != u.ratio(1, 16)?;
    for _ in 0..u.int_in_range(0..=2)? {
        let at = u.int_in_range(0..=slice.endpoints.len())?;
        let new = if u.ratio(2, 3)? { Some(endpoint(u, slice.family)?) } else { None };
        slice.endpoints.splice(at..slice.endpoints.len().min(at + 1), new);
    }
    if u.ratio(7, 8)? {
        make_plain(&mut slice, has_zones, u)?;
    }
    Ok(slice)
}

fn node(u: &mut Unstructured<'_>) -> Result<Node> {
    let zone = if u.arbitrary()? { Some(Arc::from(*u.choose(&ZONES)?)) } else { None };
    let info = state::NodeInfo {
        is_being_deleted: u.ratio(1, 8)?,
        addresses: addresses(u)?,
        pod_cidrs: if u.arbitrary()? { ranges() } else { Vec::new() },
    };
    Ok(Node { name: Arc::from(*u.choose(&NODES)?), zone, info })
}
