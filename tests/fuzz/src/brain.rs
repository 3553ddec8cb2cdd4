//! Arbitrary bytes as the history of a cluster.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    num::{NonZeroU16, NonZeroU32},
    sync::Arc,
};

use arbitrary::{Result, Unstructured};
use brain::{Brain, Options, node_state};
use model::{
    Family, Protocol, ServiceName, Timestamp,
    cluster::{
        ClusterState, Conditions, Endpoint, EndpointSlice, Node, Service, ServicePort, SliceName, SlicePort,
    },
    state::{self, ClientIpAffinity, NodeState, ServiceKind, TargetPort, TrafficPolicy},
};

use crate::{invariants, wire};

const NODES: [&str; 3] = ["n1", "n2", "n3"];
const ZONES: [&str; 2] = ["a", "b"];
const SERVICES: [&str; 3] = ["web", "api", "old"];
const PORT_NAMES: [&str; 3] = ["", "http", "dns"];

/// After every step the state of each node equals the result of the pure function, and exactly the changed states are
/// reported as changed.
pub fn target(bytes: &[u8]) {
    // A truncated history has been checked as far as it goes.
    let _ = history(&mut Unstructured::new(bytes));
}

fn history(u: &mut Unstructured<'_>) -> Result<()> {
    let options = Options {
        service_proxy_name: u.ratio(1, 8)?.then(|| "mesh".to_owned()),
        external_ips: !u.ratio(1, 8)?,
    };
    let mut brain = Brain::new(options.clone());
    brain.start_serving("n1");
    let mut served = BTreeSet::from(["n1"]);
    while !u.is_empty() {
        match u.int_in_range(0..=15)? {
            0..=2 => brain.set_service(service(u)?),
            3 => brain.delete_service(&service_name(u)?),
            4..=8 => brain.set_slice(slice(u)?),
            9 => brain.delete_slice(&slice_name(u)?),
            10 => brain.set_node(node(u)?),
            11 => brain.delete_node(u.choose(&NODES)?),
            12 => {
                let node = *u.choose(&NODES)?;
                served.insert(node);
                brain.start_serving(node);
            }
            13 => {
                let node = *u.choose(&NODES)?;
                served.remove(node);
                brain.stop_serving(node);
            }
            14 => {
                // Several changes as one snapshot, as sources deliver them.
                let mut cluster = ClusterState::clone(brain.cluster_state());
                cluster.set_slice(slice(u)?);
                cluster.set_service(service(u)?);
                cluster.delete_service(&service_name(u)?);
                cluster.set_node(node(u)?);
                brain.replace_cluster(Arc::new(cluster));
            }
            _ => recompute(&mut brain, &served, &options),
        }
    }
    recompute(&mut brain, &served, &options);
    Ok(())
}

fn recompute(brain: &mut Brain, served: &BTreeSet<&str>, options: &Options) {
    let before = states(brain);
    let changed = brain.recompute();
    let after = states(brain);
    assert!(after.keys().map(|it| &**it).eq(served.iter().copied()), "every served node has a state");
    assert!(changed.iter().all(|it| after.contains_key(it)), "every changed node is served");
    for (name, now) in &after {
        assert_eq!(
            *now,
            node_state(brain.cluster_state(), name, options),
            "{name}: incremental and pure results are equal"
        );
        let old = before.get(name);
        assert_eq!(changed.contains(name), old != Some(now), "{name} is reported if and only if it changed");
        invariants::state(now);
        now.services.values().for_each(|it| wire::round_trip(it));
        let old = old.cloned().unwrap_or_default();
        for (service, was, is) in now.diff(&old) {
            assert_ne!(was, is, "{service} differs");
        }
        let mut patched = old.services.clone();
        for (service, _, is) in now.diff(&old) {
            match is {
                Some(is) => drop(patched.insert(Arc::clone(is))),
                None => drop(patched.remove(service)),
            }
        }
        assert_eq!(patched, now.services, "{name}: the difference leads from one to the other");
    }
    invariants::rejected(&brain.rejected().collect::<Vec<_>>());
}

fn states(brain: &Brain) -> BTreeMap<Arc<str>, NodeState> {
    brain.served_nodes().filter_map(|it| Some((Arc::clone(it), brain.state(it)?.clone()))).collect()
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

fn service(u: &mut Unstructured<'_>) -> Result<Service> {
    let kinds =
        [None, Some(ServiceKind::ClusterIp), Some(ServiceKind::NodePort), Some(ServiceKind::LoadBalancer)];
    let mut cluster_ips = addresses(u)?;
    cluster_ips.dedup_by_key(|it| Family::of(*it));
    let mut ports: Vec<ServicePort> = Vec::new();
    for _ in 0..u.int_in_range(0..=3)? {
        let port = ServicePort {
            name: (*u.choose(&PORT_NAMES)?).to_owned(),
            protocol: protocol(u)?,
            port: number(u, &[53, 80])?,
            node_port: if u.ratio(1, 3)? { Some(number(u, &[30_000, 30_001])?) } else { None },
            target_port: if u.arbitrary()? {
                TargetPort::Number(number(u, &[8080, 8081])?)
            } else {
                TargetPort::Name("web".to_owned())
            },
        };
        if !ports.iter().any(|it| (it.port, it.protocol) == (port.port, port.protocol)) {
            ports.push(port);
        }
    }
    Ok(Service {
        name: service_name(u)?,
        created: time(u)?,
        kind: *u.choose(&kinds)?,
        proxy_name: u.ratio(1, 8)?.then(|| "mesh".to_owned()),
        cluster_ips,
        external_ips: addresses(u)?,
        load_balancer_ips: addresses(u)?,
        ports,
        internal_policy: policy(u)?,
        external_policy: policy(u)?,
        affinity: u.ratio(1, 4)?.then_some(ClientIpAffinity { timeout_seconds: NonZeroU32::MIN }),
        source_ranges: Vec::new(),
        health_check_node_port: None,
    })
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

fn slice(u: &mut Unstructured<'_>) -> Result<EndpointSlice> {
    let family = family(u)?;
    let mut ports = Vec::new();
    for _ in 0..u.int_in_range(0..=2)? {
        let name = (*u.choose(&PORT_NAMES)?).to_owned();
        ports.push(SlicePort { name, protocol: protocol(u)?, port: number(u, &[8080, 8081])? });
    }
    let mut endpoints = Vec::new();
    for _ in 0..u.int_in_range(0..=4)? {
        let [ready, serving, terminating] = [u.ratio(2, 3)?, u.ratio(2, 3)?, u.ratio(1, 3)?];
        endpoints.push(Endpoint {
            address: address(u, family)?,
            conditions: Conditions { ready, serving, terminating },
            node: if u.ratio(3, 4)? { Some(Arc::from(*u.choose(&NODES)?)) } else { None },
            pod: if u.ratio(3, 4)? { Some(format!("p{}", u.int_in_range(0..=3)?).into()) } else { None },
            hostname: if u.ratio(1, 8)? { "host".to_owned() } else { String::new() },
            node_hints: names(u, &NODES)?,
            zone_hints: names(u, &ZONES)?,
        });
    }
    Ok(EndpointSlice {
        name: slice_name(u)?,
        service: service_name(u)?,
        headless: u.ratio(1, 8)?,
        family,
        ports,
        endpoints,
        trigger_time: time(u)?,
    })
}

fn node(u: &mut Unstructured<'_>) -> Result<Node> {
    let zone = if u.arbitrary()? { Some(Arc::from(*u.choose(&ZONES)?)) } else { None };
    let info = state::NodeInfo {
        is_being_deleted: u.ratio(1, 8)?,
        addresses: addresses(u)?,
        ..state::NodeInfo::default()
    };
    Ok(Node { name: Arc::from(*u.choose(&NODES)?), zone, info })
}
