//! Round trips, and the messages of other brains.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    num::{NonZeroU8, NonZeroU16, NonZeroU32},
    sync::Arc,
};

use ipnet::IpNet;
use model::{
    Protocol, RequestedMetadata, ServiceMetadata, ServiceName,
    address::{AddressUse, canonical_range, refusal},
    escaped_line,
    state::{
        Algorithm, ClientIpAffinity, Endpoint, EndpointKey, EndpointPort, LoadBalancing, PassiveHealth,
        PerFamily, Scopes, Service, ServiceKind, ServicePort, ServiceState, TargetPort, TrafficPolicy,
    },
};
use proptest::{
    collection::{btree_map, vec},
    option,
    prelude::*,
};
use prost::Message;
use proxy_contract::localv1;

use super::{Decoded, endpoint, endpoint_key, service};

/// The state of a Service with all its labels and annotations.
fn service_state<'a>(
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
    (algorithm, any::<Option<bool>>(), failures, percent, slow_start, drain).prop_map(
        |(algorithm, enabled, failures, max_ejected_percent, slow_start, drain)| LoadBalancing {
            algorithm,
            passive_health: PassiveHealth {
                enabled,
                failures: failures.flatten(),
                max_ejected_percent: max_ejected_percent.flatten(),
            },
            slow_start: slow_start.flatten(),
            drain: drain.flatten(),
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
            let key = if pod { EndpointKey::Pod(key) } else { EndpointKey::Anonymous(format!("@{key}")) };
            Endpoint {
                key,
                hostname,
                v4,
                v6,
                local,
                serving_terminating,
                ports: ports.into_values().collect(),
            }
        },
    )
}

fn some_state() -> impl Strategy<Value = ServiceState> {
    (some_service(), vec(some_endpoint(), 0..5)).prop_map(|(service, mut endpoints)| {
        let count = service.ports.len();
        for endpoint in &mut endpoints {
            endpoint.ports.retain(|it| usize::from(it.index) < count);
        }
        endpoints.retain(|it| !it.ports.is_empty());
        endpoints.sort_by(|a, b| a.key.cmp(&b.key));
        endpoints.dedup_by(|a, b| a.key == b.key);
        ServiceState::new(service, endpoints)
    })
}

fn round_trip(state: &ServiceState) -> ServiceState {
    let bytes = service(&state.service).encode_to_vec();
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
        prop_assert_eq!(round_trip(&state), state);
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

/// A Service with one port, as KPNG's brain sends it.
fn kpng_service(port: localv1::PortMapping) -> localv1::Service {
    let ips = localv1::ServiceIPs {
        cluster_ips: Some(localv1::IpSet { v4: vec!["10.96.0.1".into()], v6: Vec::new() }),
        ..Default::default()
    };
    let port = localv1::PortMapping { protocol: localv1::Protocol::Tcp.into(), port: 443, ..port };
    localv1::Service {
        namespace: "ns".into(),
        name: "svc".into(),
        ips: Some(ips),
        ports: vec![port],
        ..Default::default()
    }
}

fn kpng_endpoint(ports: &[(&str, i32)]) -> localv1::Endpoint {
    let ports = ports.iter().map(|(name, port)| localv1::PortName {
        name: (*name).to_owned(),
        port: *port,
        ..Default::default()
    });
    localv1::Endpoint {
        ips: Some(localv1::IpSet { v4: vec!["10.1.0.1".into()], v6: Vec::new() }),
        scopes: Some(localv1::EndpointScopes { internal: true, external: false, cluster: None }),
        port_overrides: ports.collect(),
        ..Default::default()
    }
}

#[test]
fn a_port_of_another_brain_is_found_by_name_and_without_a_name_by_target_port() {
    let web = localv1::PortMapping { name: "web".into(), target_port: 80, ..Default::default() };
    let target_web = localv1::PortMapping { target_port_name: "web".into(), ..Default::default() };
    let number = localv1::PortMapping { target_port: 8443, ..Default::default() };
    let cases: [(_, &[(&str, i32)], _); 5] = [
        (&web, &[("web", 8443)], Some(8443)),
        (&web, &[("other", 8443)], None),
        (&web, &[], None),
        (&target_web, &[("web", 8443)], Some(8443)),
        (&number, &[], Some(8443)),
    ];
    for (port, ports, expect) in cases {
        let (service, endpoint) = (kpng_service(port.clone()), kpng_endpoint(ports));
        let state = service_state(&service, [("pod", &endpoint)]).value.unwrap();
        assert_eq!(state.endpoints.first().map(|it| it.ports[0].port.get()), expect, "{port:?} {ports:?}");
        assert_eq!(endpoint.port(&service, 0), expect, "the client library: {port:?} {ports:?}");
    }
}

#[test]
fn an_absent_cluster_scope_means_every_usable_endpoint() {
    let endpoint = kpng_endpoint(&[("", 1)]);
    let state =
        service_state(&kpng_service(localv1::PortMapping::default()), [("pod", &endpoint)]).value.unwrap();
    assert_eq!(state.endpoints[0].ports[0].scopes, Scopes { internal: true, external: false, cluster: true });
    assert!(!state.service.ports[0].has_any_endpoint.v4);
}

#[test]
fn a_brain_that_says_nothing_about_load_balancing_means_the_defaults() {
    let state = service_state(&kpng_service(localv1::PortMapping::default()), []).value.unwrap();
    assert_eq!(state.service.load_balancing, LoadBalancing::default());
    // And nothing is sent of them, so that an older backend receives the bytes that it always did.
    assert_eq!(service(&state.service).load_balancing, None);
}

#[test]
fn invalid_load_balancing_is_rejected_and_means_the_default() {
    let health = |failures, max_ejected_percent| localv1::PassiveHealth {
        enabled: Some(false),
        failures: Some(failures),
        max_ejected_percent: Some(max_ejected_percent),
    };
    for (failures, percent, slow_start_seconds, drain_seconds) in
        [(0, 0, 3_601, 86_401), (51, 101, 65_537, u32::MAX), (257, 257, u32::MAX, 86_401)]
    {
        let load_balancing = localv1::LoadBalancing {
            algorithm: 99,
            passive_health: Some(health(failures, percent)),
            slow_start_seconds,
            drain_seconds,
        };
        let message = localv1::Service {
            load_balancing: Some(load_balancing),
            ..kpng_service(localv1::PortMapping::default())
        };
        let decoded = service_state(&message, []);
        let passive_health = PassiveHealth { enabled: Some(false), ..PassiveHealth::default() };
        let expect = LoadBalancing { passive_health, ..LoadBalancing::default() };
        assert_eq!(decoded.value.unwrap().service.load_balancing, expect);
        let fields = ["algorithm", "passive_health.failures", "passive_health.max_ejected_percent"];
        let fields = fields.into_iter().chain(["slow_start_seconds", "drain_seconds"]);
        let items: Vec<_> = decoded.rejected.iter().map(|it| it.item.clone()).collect();
        assert_eq!(
            items,
            fields.map(|it| format!("service ns/svc: load_balancing.{it}")).collect::<Vec<_>>()
        );
    }
}

#[test]
fn an_invalid_port_shifts_no_endpoint_to_another_port() {
    let good = |port| localv1::PortMapping { protocol: 1, port, ..Default::default() };
    let mut service = kpng_service(localv1::PortMapping::default());
    service.ports = vec![good(0), good(443)];
    let mut endpoint = kpng_endpoint(&[("", 1), ("", 2)]);
    endpoint.port_overrides[0].index = Some(0);
    endpoint.port_overrides[1].index = Some(1);
    let decoded = service_state(&service, [("pod", &endpoint)]);
    let ports = &decoded.value.unwrap().endpoints[0].ports;
    assert_eq!(ports.iter().map(|it| (it.index, it.port.get())).collect::<Vec<_>>(), [(0, 2)]);
    assert_eq!(decoded.rejected.len(), 1);
}

#[test]
fn what_an_api_server_rejects_is_rejected_from_another_brain_too() {
    let state = |cluster_ip: &str, address: &str, name: &str| {
        let family = |it: &str| {
            let list = vec![it.to_owned()];
            let is_v6 = it.contains(':');
            localv1::IpSet {
                v4: if is_v6 { Vec::new() } else { list.clone() },
                v6: if is_v6 { list } else { Vec::new() },
            }
        };
        let ips = localv1::ServiceIPs {
            cluster_ips: Some(family(cluster_ip)),
            external_ips: Some(family(address)),
            load_balancer_ips: Some(family(address)),
            ..Default::default()
        };
        let port = localv1::PortMapping { name: name.into(), port: 80, protocol: 1, ..Default::default() };
        let message = localv1::Service {
            namespace: "ns".into(),
            name: "svc".into(),
            ips: Some(ips),
            ports: vec![port],
            ..Default::default()
        };
        let endpoint = localv1::Endpoint {
            ips: Some(family(address)),
            hostname: name.into(),
            scopes: Some(localv1::EndpointScopes { internal: true, ..Default::default() }),
            port_overrides: vec![localv1::PortName { port: 80, index: Some(0), ..Default::default() }],
            ..Default::default()
        };
        service_state(&message, [("a", &endpoint), (if name == "http" { "b" } else { name }, &endpoint)])
    };
    let valid = state("10.96.0.1", "10.1.0.1", "http");
    assert_eq!(valid.rejected, []);
    assert_eq!(valid.value.unwrap().endpoints.len(), 2);
    for address in
        ["127.0.0.1", "169.254.169.254", "224.0.0.1", "0.0.0.0", "::1", "fe80::1", "::ffff:10.1.0.1"]
    {
        let decoded = state("10.96.0.1", address, "http");
        let served = decoded.value.unwrap();
        assert_eq!(served.service.addresses().count(), 1, "{address}");
        assert_eq!(served.endpoints, [], "{address}");
        assert!(decoded.rejected.len() >= 4, "{address}: {:?}", decoded.rejected);
    }
    for address in ["127.0.0.1", "::1", "::ffff:10.96.0.1"] {
        assert_eq!(state(address, "10.1.0.1", "http").value, None);
    }
    for name in ["a\u{1b}[2J", "a\nb", "\u{202e}a", "A b"] {
        let decoded = state("10.96.0.1", "10.1.0.1", name);
        let served = decoded.value.unwrap();
        assert_eq!((served.service.ports.len(), served.endpoints.len()), (0, 0), "{name:?}");
        assert!(!decoded.rejected.is_empty());
        for it in decoded.rejected.iter().map(ToString::to_string) {
            assert_eq!(escaped_line(&it), it);
        }
    }
}

#[test]
fn labels_and_annotations_are_kept_if_they_are_requested_and_valid() {
    let map = |items: &[(&str, &str)]| {
        items.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect::<BTreeMap<_, _>>()
    };
    let message = localv1::Service {
        labels: map(&[("app", "web"), ("tier", "a b")]),
        annotations: map(&[("example.com/note", "\u{1b}[2J\n"), ("a\u{202e}b", "")]),
        ..kpng_service(localv1::PortMapping::default())
    };
    let metadata = |decoded: &Decoded<Option<ServiceState>>| {
        decoded.value.as_ref().unwrap().service.metadata.as_deref().cloned().unwrap_or_default()
    };
    let Decoded { value, rejected } = super::service_state(&message, [], &RequestedMetadata::default());
    assert_eq!((value.unwrap().service.metadata.as_deref(), rejected), (None, Vec::new()));
    let all = service_state(&message, []);
    assert_eq!(metadata(&all).labels, map(&[("app", "web")]));
    assert_eq!(metadata(&all).annotations, map(&[("example.com/note", "\u{1b}[2J\n")]));
    assert_eq!(all.rejected.len(), 2);
    for it in all.rejected.iter().map(ToString::to_string) {
        assert_eq!(escaped_line(&it), it);
    }
    let app = RequestedMetadata::new(vec!["a*".parse().unwrap()], Vec::new());
    let some = super::service_state(&message, [], &app);
    assert_eq!(metadata(&some), ServiceMetadata { labels: map(&[("app", "web")]), ..Default::default() });
    assert_eq!(some.rejected, []);
}
