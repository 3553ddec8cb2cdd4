//! Round trips.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    num::{NonZeroU8, NonZeroU16, NonZeroU32},
    sync::Arc,
};

use ipnet::IpNet;
use model::{
    Family, Protocol, RequestedMetadata, ServiceMetadata, ServiceName, Timestamp,
    address::{AddressUse, canonical_range, refusal},
    state::{
        Algorithm, ClientIpAffinity, Endpoint, EndpointKey, EndpointPort, ExternalForwarding, ForwardedPort,
        LoadBalancing, NodeShare, PassiveHealth, PerFamily, PortTarget, Scopes, Service, ServiceKind,
        ServicePort, ServiceState, TargetPort, TrafficPolicy,
    },
};
use proptest::{
    collection::{btree_map, btree_set, vec},
    option,
    prelude::*,
};
use prost::Message;
use proxy_contract::localv1;

use super::{Decoded, Extensions, endpoint, endpoint_key, service, service_with_extensions};

/// The state of a Service with all its labels and annotations.
pub(crate) fn service_state<'a>(
    message: &localv1::Service,
    endpoints: impl IntoIterator<Item = (&'a str, &'a localv1::Endpoint)>,
) -> Decoded<Option<ServiceState>> {
    super::service_state(message, endpoints, &RequestedMetadata::everything())
}

fn is_of_one_host(address: impl Into<IpAddr>) -> bool {
    refusal(address.into(), AddressUse::Endpoint).is_none()
}

fn v4() -> impl Strategy<Value = Ipv4Addr> {
    any::<Ipv4Addr>().prop_filter("not of one host", |it| is_of_one_host(*it))
}

fn v6() -> impl Strategy<Value = Ipv6Addr> {
    any::<Ipv6Addr>().prop_filter("not of one host", |it| is_of_one_host(*it))
}

fn addresses() -> impl Strategy<Value = Vec<IpAddr>> {
    (vec(v4(), 0..3), vec(v6(), 0..3))
        .prop_map(|(v4, v6)| v4.into_iter().map(IpAddr::V4).chain(v6.into_iter().map(IpAddr::V6)).collect())
}

fn cluster_ips() -> impl Strategy<Value = Vec<IpAddr>> {
    (option::of(v4()), v6(), any::<bool>()).prop_map(|(v4, v6, v6_first)| {
        let mut both: Vec<_> = v4.map(IpAddr::V4).into_iter().chain([IpAddr::V6(v6)]).collect();
        if v6_first {
            both.reverse();
        }
        both
    })
}

fn ranges() -> impl Strategy<Value = Vec<IpNet>> {
    vec((any::<IpAddr>(), 0_u8..=32), 0..3).prop_map(|items| {
        let ranges =
            items.into_iter().filter_map(|(ip, length)| Some(canonical_range(IpNet::new(ip, length).ok()?)));
        let mut ranges: Vec<_> = ranges.collect::<BTreeSet<_>>().into_iter().collect();
        ranges.sort_by_key(|it| it.addr().is_ipv6());
        ranges
    })
}

fn protocol() -> impl Strategy<Value = Protocol> {
    prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp), Just(Protocol::Sctp)]
}

fn target_port() -> impl Strategy<Value = TargetPort> {
    prop_oneof![any::<NonZeroU16>().prop_map(TargetPort::Number), "[a-z]{1,4}".prop_map(TargetPort::Name)]
}

fn port() -> impl Strategy<Value = ServicePort> {
    (
        "[a-z]{0,2}",
        protocol(),
        any::<NonZeroU16>(),
        option::of(any::<NonZeroU16>()),
        target_port(),
        any::<(bool, bool)>(),
        addresses(),
    )
        .prop_map(|(name, protocol, port, node_port, target_port, (v4, v6), conflicting_addresses)| {
            ServicePort {
                name,
                protocol,
                port,
                node_port,
                target_port,
                conflicting_addresses,
                has_any_endpoint: PerFamily { v4, v6 },
            }
        })
}

fn policy() -> impl Strategy<Value = TrafficPolicy> {
    prop_oneof![Just(TrafficPolicy::Cluster), Just(TrafficPolicy::Local)]
}

fn kind() -> impl Strategy<Value = ServiceKind> {
    prop_oneof![Just(ServiceKind::ClusterIp), Just(ServiceKind::NodePort), Just(ServiceKind::LoadBalancer)]
}

fn load_balancing() -> impl Strategy<Value = LoadBalancing> {
    let algorithm = prop_oneof![Just(Algorithm::Random), Just(Algorithm::LeastConnections)];
    let percent = option::of((1_u8..=100).prop_map(NonZeroU8::new));
    let failures = option::of((1..=PassiveHealth::MAX_FAILURES).prop_map(NonZeroU8::new));
    let slow_start = option::of((1..=LoadBalancing::MAX_SLOW_START).prop_map(NonZeroU16::new));
    let drain = option::of((1..=LoadBalancing::MAX_DRAIN).prop_map(NonZeroU32::new));
    let forwarding = option::of(prop_oneof![Just(ExternalForwarding::Nat), Just(ExternalForwarding::Dsr)]);
    let health = (any::<Option<bool>>(), failures, percent);
    (algorithm, health, slow_start, drain, any::<bool>(), forwarding).prop_map(
        |(algorithm, health, slow_start, drain, udp_to_packets, external_forwarding)| {
            let (enabled, failures, max_ejected_percent) = health;
            LoadBalancing {
                algorithm,
                passive_health: PassiveHealth {
                    enabled,
                    failures: failures.flatten(),
                    max_ejected_percent: max_ejected_percent.flatten(),
                },
                slow_start: slow_start.flatten(),
                drain: drain.flatten(),
                udp_to_packets,
                external_forwarding,
            }
        },
    )
}

fn metadata() -> impl Strategy<Value = Option<Arc<ServiceMetadata>>> {
    let name = "([a-z]{1,4}\\.example/)?[a-zA-Z0-9]([a-z.]{0,3}[a-z])?";
    (btree_map(name, "[a-z0-9]{0,4}", 0..3), btree_map(name, any::<String>(), 0..3)).prop_map(
        |(labels, annotations)| {
            let found = ServiceMetadata { labels, annotations };
            (found != ServiceMetadata::default()).then(|| Arc::new(found))
        },
    )
}

fn some_service() -> impl Strategy<Value = Service> {
    let policies = (policy(), policy());
    let affinity = option::of((1_u32..100_000).prop_filter_map("zero", NonZeroU32::new));
    let rest = (affinity, ranges(), option::of(any::<NonZeroU16>()), load_balancing(), metadata());
    (kind(), cluster_ips(), addresses(), addresses(), vec(port(), 0..4), policies, rest).prop_map(
        |(kind, cluster_ips, external_ips, load_balancer_ips, mut ports, policies, rest)| {
            let mut seen = BTreeSet::new();
            ports.retain(|it| seen.insert((it.port, it.protocol)));
            Service {
                name: ServiceName::new("ns", "svc"),
                kind,
                cluster_ips,
                external_ips,
                load_balancer_ips,
                ports,
                internal_policy: policies.0,
                external_policy: policies.1,
                affinity: rest.0.map(|timeout_seconds| ClientIpAffinity { timeout_seconds }),
                source_ranges: rest.1,
                health_check_node_port: rest.2,
                load_balancing: rest.3,
                metadata: rest.4,
            }
        },
    )
}

fn scopes() -> impl Strategy<Value = Scopes> {
    any::<(bool, bool, bool)>().prop_map(|(internal, external, cluster)| Scopes {
        internal,
        external,
        cluster: cluster || !(internal || external),
    })
}

fn some_endpoint() -> impl Strategy<Value = Endpoint> {
    let ports = vec((0_u16..4, any::<NonZeroU16>(), scopes()), 1..4);
    let key = ("[a-z]{1,4}", any::<bool>());
    let ips = prop_oneof![
        v4().prop_map(|it| (Some(it), None)),
        v6().prop_map(|it| (None, Some(it))),
        (v4(), v6()).prop_map(|(v4, v6)| (Some(v4), Some(v6))),
    ];
    (key, "[a-z]{0,3}", ips, any::<(bool, bool)>(), ports).prop_map(
        |((key, pod), hostname, (v4, v6), (local, serving_terminating), ports)| {
            let ports: BTreeMap<_, _> = ports
                .into_iter()
                .map(|(index, port, scopes)| (index, EndpointPort { index, port, scopes }))
                .collect();
            let key = match pod {
                true => EndpointKey::Pod(key.into()),
                false => EndpointKey::Anonymous(format!("@{key}").into()),
            };
            Endpoint {
                key,
                hostname: hostname.into(),
                v4,
                v6,
                local,
                serving_terminating,
                ports: ports.into_values().collect(),
            }
        },
    )
}

fn targets() -> impl Strategy<Value = BTreeSet<PortTarget>> {
    let address = prop_oneof![v4().prop_map(IpAddr::V4), v6().prop_map(IpAddr::V6)];
    let target = (address, any::<u16>()).prop_map(SocketAddr::from);
    btree_set((0_u16..4, target).prop_map(|(index, target)| PortTarget { index, target }), 0..4)
}

fn forwarded() -> impl Strategy<Value = BTreeMap<(u16, Family), ForwardedPort>> {
    let nodes = btree_map("[a-z]{1,3}(\\.[a-z])?", 1_u32.., 1..4);
    let families = [
        btree_set(v4().prop_map(IpAddr::V4), 0..3).boxed(),
        btree_set(v6().prop_map(IpAddr::V6), 0..3).boxed(),
    ];
    let port = (0_u16..4, nodes, families, any::<(bool, u16)>()).prop_map(
        |(index, nodes, targets, (is_v6, port))| {
            let family = if is_v6 { Family::V6 } else { Family::V4 };
            let share = |(node, endpoints): (String, _)| NodeShare { node: node.into(), endpoints };
            let nodes = nodes.into_iter().map(share).collect();
            let targets = targets[usize::from(is_v6)].iter().map(|it| SocketAddr::new(*it, port)).collect();
            ((index, family), ForwardedPort { index, family, nodes, targets })
        },
    );
    vec(port, 0..4).prop_map(BTreeMap::from_iter)
}

fn some_state() -> impl Strategy<Value = ServiceState> {
    let time = option::of(any::<i64>().prop_map(Timestamp::from_micros));
    let rest = ([targets(), targets()], time, forwarded());
    (some_service(), vec(some_endpoint(), 0..5), rest).prop_map(|(service, mut endpoints, rest)| {
        let count = service.ports.len();
        let [other_serving, not_serving] =
            rest.0.map(|it| it.into_iter().filter(|it| usize::from(it.index) < count).collect());
        let forwarded = rest.2.into_values().filter(|it| usize::from(it.index) < count).collect();
        for endpoint in &mut endpoints {
            endpoint.ports =
                endpoint.ports.iter().filter(|it| usize::from(it.index) < count).copied().collect();
        }
        endpoints.retain(|it| !it.ports.is_empty());
        endpoints.sort_by(|a, b| a.key.cmp(&b.key));
        endpoints.dedup_by(|a, b| a.key == b.key);
        let state = ServiceState::new(service, endpoints);
        ServiceState { other_serving, not_serving, forwarded, trigger_time: rest.1, ..state }
    })
}

fn round_trip(state: &ServiceState) -> ServiceState {
    let bytes = service_with_extensions(state, Extensions::LOCAL).encode_to_vec();
    let message = localv1::Service::decode(bytes.as_slice()).unwrap();
    let endpoints: Vec<_> =
        state.endpoints.iter().map(|it| (endpoint_key(it), endpoint(&state.service, it))).collect();
    let decoded = service_state(&message, endpoints.iter().map(|(key, it)| (*key, it)));
    assert_eq!(decoded.rejected, []);
    decoded.value.unwrap()
}

proptest! {
    #[test]
    fn a_round_trip_gives_the_same_state(state in some_state()) {
        let found = round_trip(&state);
        prop_assert_eq!(found.trigger_time, state.trigger_time);
        prop_assert_eq!(found, state);
    }

    #[test]
    fn the_client_library_finds_the_same_ports(state in some_state()) {
        let message = service(&state.service);
        for it in &*state.endpoints {
            let sent = endpoint(&state.service, it);
            for index in 0..message.ports.len() {
                let expected = it.ports.iter().find(|it| usize::from(it.index) == index);
                prop_assert_eq!(sent.port(&message, index), expected.map(|it| it.port.get()));
                if let Some(EndpointPort { scopes, .. }) = expected {
                    let cluster = Some(scopes.cluster);
                    let scopes = localv1::EndpointScopes { internal: scopes.internal, external: scopes.external, cluster };
                    prop_assert_eq!(sent.scopes_at(&message, index), scopes);
                }
            }
        }
    }

    #[test]
    fn arbitrary_messages_do_not_panic(
        service in vec(any::<u8>(), 0..200),
        endpoint in vec(any::<u8>(), 0..200),
        port in any::<(i32, i32, i32, Option<u32>)>(),
    ) {
        let mut service = localv1::Service::decode(service.as_slice()).unwrap_or_default();
        let mut endpoint = localv1::Endpoint::decode(endpoint.as_slice()).unwrap_or_default();
        service.namespace.push('n');
        service.name.push('n');
        let set = localv1::IpSet { v4: vec!["10.0.0.1".into()], v6: vec!["x".into()] };
        service.ips.get_or_insert_default().cluster_ips = Some(set.clone());
        service.ports.push(localv1::PortMapping { protocol: port.0, port: port.1, ..Default::default() });
        endpoint.ips = Some(set);
        endpoint.port_overrides.push(localv1::PortName { port: port.2, index: port.3, ..Default::default() });
        service_state(&service, [("key", &endpoint)]);
    }
}
