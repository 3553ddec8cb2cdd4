//! Round trips, messages of KPNG's brain, and invalid ones.

use std::{
    collections::BTreeMap,
    num::{NonZeroU16, NonZeroU32},
    sync::Arc,
};

use brain::{Options, node_state};
use model::{
    Family, RequestedMetadata, ServiceMetadata, ServiceName, Timestamp,
    cluster::{
        ClusterState, Conditions, Endpoint, EndpointSlice, Hints, Node, Service, SliceName, SlicePort,
    },
    state::{
        Algorithm, ClientIpAffinity, LoadBalancing, Pod, Scope, ServiceCidr, ServiceKind, ServicePort,
        SocketLb, TargetPort, TrafficPolicy,
    },
};
use proxy_contract::{
    client::{Cluster, ClusterChange, ClusterService},
    globalv1::{self, EndpointConditions, EndpointInfo, NodeInfo, ServiceInfo, TopologyHints, TopologyInfo},
    localv1::{self, IpSet, PortMapping, PortName, Protocol},
};

use super::{
    ClusterDecoder, endpoint_info, endpoints_by_key, is_node_sent, is_service_sent, is_slice_sent, node_info,
    service_info, service_with_slices,
};
use crate::{pod, service_cidr};

/// A decoder that is given full states.
#[derive(Default)]
struct Downstream {
    decoder: ClusterDecoder,
    last: Cluster,
}

impl Downstream {
    fn decode(&mut self, cluster: &Cluster) -> Arc<ClusterState> {
        type Values<T> = BTreeMap<Arc<str>, Arc<T>>;
        fn edits<T>(before: &Values<T>, after: &Values<T>) -> BTreeMap<Arc<str>, Option<Arc<T>>> {
            let differing = model::diff::differing(before, after);
            differing.map(|(name, _, after)| (Arc::clone(name), after.cloned())).collect()
        }
        let before = std::mem::replace(&mut self.last, cluster.clone());
        self.decoder.apply(&ClusterChange {
            service_cidrs: edits(&before.service_cidrs, &cluster.service_cidrs),
            pods: edits(&before.pods, &cluster.pods),
            nodes: edits(&before.nodes, &cluster.nodes),
            services: edits(&before.services, &cluster.services),
            ..ClusterChange::default()
        })
    }
}

fn decode(cluster: &Cluster) -> Arc<ClusterState> {
    Downstream::default().decode(cluster)
}

fn port(name: &str, port: i32, target_port: i32, target_port_name: &str) -> PortMapping {
    PortMapping {
        name: name.into(),
        protocol: Protocol::Tcp.into(),
        port,
        target_port,
        target_port_name: target_port_name.into(),
        ..PortMapping::default()
    }
}

/// A Service as KPNG's brain sends it, without our extensions.
fn service(ports: Vec<PortMapping>) -> ServiceInfo {
    let service = localv1::Service {
        namespace: "ns".into(),
        name: "web".into(),
        r#type: "ClusterIP".into(),
        ips: Some(localv1::ServiceIPs {
            cluster_ips: Some(IpSet::of(["10.96.0.1", "fd00::1"])),
            external_ips: Some(IpSet::default()),
            ..Default::default()
        }),
        ports,
        ..Default::default()
    };
    ServiceInfo { hash: 1, service: Some(service), ..ServiceInfo::default() }
}

/// An endpoint on a node, which is ready.
fn endpoint(addresses: &[&str], overrides: &[(&str, i32)]) -> EndpointInfo {
    let overrides = overrides.iter().map(|(name, port)| PortName {
        name: (*name).into(),
        port: *port,
        ..PortName::default()
    });
    EndpointInfo {
        hash: 1,
        namespace: "ns".into(),
        source_name: "web-1".into(),
        service_name: "web".into(),
        endpoint: Some(localv1::Endpoint {
            ips: Some(IpSet::of(addresses)),
            port_overrides: overrides.collect(),
            ..Default::default()
        }),
        conditions: Some(EndpointConditions { ready: true, ..EndpointConditions::default() }),
        topology: Some(TopologyInfo { node: "n1".into(), zone: String::new() }),
        ..EndpointInfo::default()
    }
}

fn ready(address: &str) -> EndpointInfo {
    endpoint(&[address], &[("", 8080)])
}

fn cluster_service(service: ServiceInfo, endpoints: Vec<EndpointInfo>) -> Arc<ClusterService> {
    let endpoints = endpoints.into_iter().enumerate();
    let endpoints = endpoints.map(|(at, it)| (format!("web-1|{at}").into(), Arc::new(it))).collect();
    Arc::new(ClusterService { service, endpoints })
}

/// A Service with a port without a name.
fn plain(endpoints: Vec<EndpointInfo>) -> Arc<ClusterService> {
    cluster_service(service(vec![port("", 80, 8080, "")]), endpoints)
}

fn cluster(service: Arc<ClusterService>) -> Cluster {
    let services = BTreeMap::from([("ns/web".into(), service)]);
    Cluster { services, ..Cluster::default() }
}

/// The targets of each port on a node without endpoints.
fn targets(cluster: &ClusterState) -> Vec<Vec<String>> {
    let state = node_state(cluster, "elsewhere", &Options::default());
    let Some(it) = state.services.get(&ServiceName::new("ns", "web")) else { return Vec::new() };
    let of = |port| Family::ALL.into_iter().flat_map(move |family| it.targets(port, family, Scope::Internal));
    (0..it.service.ports.len()).map(|port| of(port).map(|it| it.to_string()).collect()).collect()
}

#[test]
fn ports_of_kpng_are_found_by_name_or_have_the_number_of_the_service() {
    let check = |ports: Vec<PortMapping>, overrides: &[(&str, i32)], expect: &[&str]| {
        let count = ports.len();
        let one = endpoint(&["10.1.0.1"], overrides);
        let state = decode(&cluster(cluster_service(service(ports), vec![one])));
        let found: Vec<_> = targets(&state).iter().map(|it| it.join(" ")).collect();
        assert_eq!((found, count), (expect.iter().map(ToString::to_string).collect(), expect.len()));
    };
    let two = || vec![port("http", 80, 8080, ""), port("metrics", 9090, 0, "prom")];
    check(two(), &[("http", 8081), ("metrics", 9091)], &["10.1.0.1:8081", "10.1.0.1:9091"]);
    // An endpoint without a port of this name does not serve it.
    check(two(), &[("http", 8081), ("prom", 9091)], &["10.1.0.1:8081", ""]);
    // A port without a name is found by its target port, which is a name or a number.
    check(vec![port("", 53, 0, "dns")], &[("dns", 5353)], &["10.1.0.1:5353"]);
    check(vec![port("", 53, 0, "dns")], &[("", 5353)], &["10.1.0.1:5353"]);
    check(vec![port("", 443, 8443, "")], &[], &["10.1.0.1:8443"]);
    check(vec![port("", 53, 0, "dns")], &[], &[""]);
    check(vec![port("http", 80, 8080, "")], &[("other", 8081)], &[""]);
}

#[test]
fn absent_conditions_have_the_defaults_of_kubernetes() {
    let with = |conditions, address| EndpointInfo { conditions, ..ready(address) };
    let unready = with(Some(EndpointConditions::default()), "10.1.0.2");
    let it = plain(vec![ready("10.1.0.1"), unready, with(None, "10.1.0.3")]);
    let (_, slices) = service_with_slices(&it, &RequestedMetadata::default()).value.unwrap();
    let conditions: Vec<_> = slices[0].endpoints.iter().map(|it| it.conditions).collect();
    let of = |ready| Conditions { ready, serving: true, terminating: false };
    assert_eq!(conditions, [of(true), of(false), of(true)]);
    // Without the condition terminating, an endpoint that is not ready is no fallback.
    let state = decode(&cluster(it));
    assert_eq!(targets(&state), [["10.1.0.1:8080", "10.1.0.3:8080"]]);
}

#[test]
fn hints_and_zones_of_kpng_are_used() {
    let hinted = |address: &str, zone: &str| EndpointInfo {
        hints: Some(TopologyHints { zones: vec![zone.into()], nodes: Vec::new() }),
        ..ready(address)
    };
    let it = plain(vec![hinted("10.1.0.1", "a"), hinted("10.1.0.2", "b")]);
    let node = |zone: &str, label: &str| globalv1::Node {
        name: "elsewhere".into(),
        labels: BTreeMap::from([("topology.kubernetes.io/zone".into(), label.into())]),
        topology: Some(TopologyInfo { node: String::new(), zone: zone.into() }),
        ..globalv1::Node::default()
    };
    for (zone, label, expect) in [("a", "", "10.1.0.1:8080"), ("", "b", "10.1.0.2:8080")] {
        let info = NodeInfo { hash: 1, node: Some(node(zone, label)) };
        let nodes = BTreeMap::from([("elsewhere".into(), Arc::new(info))]);
        let state = decode(&Cluster { nodes, ..cluster(Arc::clone(&it)) });
        assert_eq!(targets(&state), [[expect]]);
    }
}

#[test]
fn an_invalid_field_is_rejected_and_the_rest_is_used_in_both_families() {
    let no_address = EndpointInfo { endpoint: None, ..ready("10.1.0.1") };
    let invalid_port = endpoint(&["10.1.0.2"], &[("", 70_000)]);
    let both = endpoint(&["10.1.0.1", "fd00:1::1"], &[("", 8080)]);
    let it = plain(vec![both, no_address, invalid_port, ready("10.1.0.300")]);
    let decoded = service_with_slices(&it, &RequestedMetadata::default());
    assert_eq!(decoded.rejected.len(), 4, "{:?}", decoded.rejected);
    let state = decode(&cluster(it));
    assert_eq!(targets(&state), [["10.1.0.1:8080", "[fd00:1::1]:8080"]]);
    // No Service, and one with an invalid name.
    for invalid in [
        ServiceInfo::default(),
        ServiceInfo {
            service: Some(localv1::Service { name: "a|b".into(), ..Default::default() }),
            ..Default::default()
        },
    ] {
        let it = cluster_service(invalid, vec![ready("10.1.0.1")]);
        assert_eq!(*decode(&cluster(it)), ClusterState::default());
    }
}

#[test]
fn an_unchanged_object_stays_the_same_object() {
    let at = |source: &str, address: &str| EndpointInfo { source_name: source.into(), ..ready(address) };
    let mut downstream = Downstream::default();
    let mut decode = |endpoints| downstream.decode(&cluster(plain(endpoints)));
    let before = decode(vec![at("a", "10.1.0.1"), at("b", "10.1.0.2")]);
    let after = decode(vec![at("a", "10.1.0.1"), at("b", "10.1.0.3")]);
    let name = ServiceName::new("ns", "web");
    assert!(Arc::ptr_eq(before.services.get(&name).unwrap(), after.services.get(&name).unwrap()));
    let same: Vec<_> =
        before.slices_of(&name).zip(after.slices_of(&name)).map(|(a, b)| Arc::ptr_eq(a, b)).collect();
    assert_eq!(same, [true, false]);
    // A removed object leaves no trace.
    let rest = decode(vec![at("b", "10.1.0.3")]);
    assert_eq!(rest.slices_of(&name).map(|it| it.name.to_string()).collect::<Vec<_>>(), ["ns/b"]);
    assert_eq!(*downstream.decode(&Cluster::default()), ClusterState::default());
}

fn encoded(cluster: &ClusterState) -> Cluster {
    let mut messages = Cluster::default();
    for service in cluster.services.values() {
        let slices: Vec<_> = cluster.slices_of(&service.name).filter(|it| is_slice_sent(it)).collect();
        let trigger_time = slices.iter().filter_map(|it| it.trigger_time).max();
        let mut endpoints = BTreeMap::new();
        for slice in slices {
            for (key, it) in endpoints_by_key(slice) {
                let path = format!("{}|{key}", slice.name.name);
                endpoints.insert(path.into(), Arc::new(endpoint_info(slice, it)));
            }
        }
        let service_message = service_info(service, trigger_time);
        let message = Arc::new(ClusterService { service: service_message, endpoints });
        messages.services.insert(service.name.to_string().into(), message);
    }
    for node in cluster.nodes.values() {
        messages.nodes.insert(Arc::clone(&node.name), Arc::new(node_info(node)));
    }
    for it in cluster.service_cidrs.values() {
        messages.service_cidrs.insert(Arc::clone(&it.name), Arc::new(service_cidr(it)));
    }
    for it in cluster.pods.values() {
        messages.pods.insert(Arc::clone(&it.name), Arc::new(pod(it)));
    }
    messages
}

fn number(port: u16) -> NonZeroU16 {
    NonZeroU16::new(port).unwrap()
}

fn slice(name: &str, family: Family) -> EndpointSlice {
    let name = SliceName { namespace: "ns".into(), name: name.into() };
    EndpointSlice::new(name, ServiceName::new("ns", "web"), family)
}

/// A cluster whose objects have something in each field.
fn full_cluster() -> ClusterState {
    let mut cluster = ClusterState::default();
    let time = Some(Timestamp::from_micros(1_700_000_000_000_001));
    cluster.services.insert(Service {
        created: Some(Timestamp::from_micros(1_600_000_000_000_000)),
        kind: ServiceKind::LoadBalancer,
        proxy_name: Some("other".into()),
        cluster_ips: vec!["fd00::1".parse().unwrap(), "10.96.0.1".parse().unwrap()],
        external_ips: vec!["192.0.2.1".parse().unwrap()],
        load_balancer_ips: vec!["192.0.2.2".parse().unwrap()],
        ports: vec![ServicePort {
            name: "http".into(),
            node_port: Some(number(30_080)),
            target_port: TargetPort::Name("web".into()),
            ..ServicePort::new(model::Protocol::Sctp, number(80))
        }],
        internal_policy: TrafficPolicy::Local,
        external_policy: TrafficPolicy::Local,
        affinity: Some(ClientIpAffinity { timeout_seconds: NonZeroU32::new(77).unwrap() }),
        load_balancing: LoadBalancing { algorithm: Algorithm::LeastConnections, ..LoadBalancing::default() },
        source_ranges: vec!["198.51.100.0/24".parse().unwrap()],
        health_check_node_port: Some(number(30_081)),
        metadata: Some(Arc::new(ServiceMetadata {
            labels: BTreeMap::from([
                ("app".into(), "web".into()),
                ("service.kubernetes.io/service-proxy-name".into(), "other".into()),
            ]),
            annotations: BTreeMap::from([("example.com/note".into(), "text".into())]),
        })),
        ..Service::new(ServiceName::new("ns", "web"))
    });
    // The Service has no port of the second name.
    let ports = vec![
        SlicePort { name: "http".into(), protocol: model::Protocol::Sctp, port: number(8080) },
        SlicePort { name: "other".into(), protocol: model::Protocol::Udp, port: number(8081) },
    ];
    cluster.set_slice(EndpointSlice {
        ports: ports.clone(),
        endpoints: vec![
            Endpoint {
                conditions: Conditions { ready: false, serving: true, terminating: true },
                node: Some("n1".into()),
                pod: Some("web-0".into()),
                hostname: "web-0".into(),
                hints: Some(Arc::new(Hints {
                    nodes: vec!["n1".into(), "n2".into()],
                    zones: vec!["a".into(), "b".into()],
                })),
                ..Endpoint::new("10.1.0.1".parse().unwrap())
            },
            Endpoint {
                conditions: Conditions { ready: false, serving: false, terminating: false },
                ..Endpoint::new("10.1.0.2".parse().unwrap())
            },
        ],
        trigger_time: time,
        ..slice("web-a", Family::V4)
    });
    cluster.set_slice(EndpointSlice {
        ports,
        endpoints: vec![Endpoint::new("fd00:1::1".parse().unwrap())],
        trigger_time: time,
        ..slice("web-b", Family::V6)
    });
    cluster.nodes.insert(Node {
        name: "n1".into(),
        zone: Some("a".into()),
        info: model::state::NodeInfo {
            addresses: vec!["10.0.0.1".parse().unwrap(), "fd00:2::1".parse().unwrap()],
            pod_cidrs: vec!["10.1.0.0/24".parse().unwrap()],
            is_being_deleted: true,
        },
    });
    cluster.set_service_cidr(ServiceCidr {
        name: "kubernetes".into(),
        cidrs: vec!["10.96.0.0/12".parse().unwrap(), "fd00::/112".parse().unwrap()],
    });
    for (name, socket_lb) in [("ns/off", SocketLb::Off), ("ns/some", SocketLb::TcpOnly)] {
        cluster.set_pod(Pod { name: name.into(), uid: "3f2a8d1c-0b4e".into(), socket_lb });
    }
    cluster
}

#[test]
fn a_round_trip_gives_the_same_cluster() {
    let cluster = full_cluster();
    let messages = encoded(&cluster);
    let all = RequestedMetadata::everything();
    for it in messages.services.values() {
        assert_eq!(service_with_slices(it, &all).rejected, []);
    }
    let mut decoder = Downstream { decoder: ClusterDecoder::new(all), ..Downstream::default() };
    let first = decoder.decode(&messages);
    assert_eq!(*first, cluster);
    // An unchanged message is not decoded again, and a removed one leaves no trace.
    assert!(Arc::ptr_eq(&first, &decoder.decode(&messages)));
    let rest = Cluster { services: messages.services, ..Cluster::default() };
    let state = decoder.decode(&rest);
    assert_eq!((state.nodes.len(), state.service_cidrs.len(), state.services.len()), (0, 0, 1));
    assert!(state.pods.is_empty());
    assert_eq!(*decoder.decode(&Cluster::default()), ClusterState::default());
}

#[test]
fn only_what_affects_a_node_is_sent() {
    let service = Service {
        cluster_ips: vec!["10.96.0.1".parse().unwrap()],
        ..Service::new(ServiceName::new("ns", "web"))
    };
    assert!(is_service_sent(&service, None, false));
    assert!(is_service_sent(&service, Some("own"), true));
    assert!(!is_service_sent(&service, Some("own"), false));
    let named = Service { proxy_name: Some("own".into()), ..service.clone() };
    assert_eq!([None, Some("own")].map(|it| is_service_sent(&named, it, false)), [false, true]);
    for unsent in [
        Service { kind: ServiceKind::ExternalName, ..service.clone() },
        Service { cluster_ips: Vec::new(), ..service.clone() },
        Service { name: ServiceName::new("n|s", "web"), ..service.clone() },
        Service { name: ServiceName::new("ns", "w/b"), ..service },
    ] {
        assert!(!is_service_sent(&unsent, None, true), "{unsent:?}");
    }
    let port = SlicePort { name: String::new(), protocol: model::Protocol::Tcp, port: number(80) };
    let sent = EndpointSlice { ports: vec![port], ..slice("web-a", Family::V4) };
    assert!(is_slice_sent(&sent));
    for unsent in [
        EndpointSlice { headless: true, ..sent.clone() },
        EndpointSlice { ports: Vec::new(), ..sent.clone() },
        EndpointSlice { name: SliceName { namespace: "ns".into(), name: "a|b".into() }, ..sent },
    ] {
        assert!(!is_slice_sent(&unsent), "{unsent:?}");
    }
    assert_eq!(["n1", "n|1", "n/1"].map(is_node_sent), [true, false, false]);
}

#[test]
fn what_kpng_reads_is_sent_too_and_source_ranges_of_families_with_a_load_balancer_ip() {
    let cluster = full_cluster();
    let slice = cluster.slices().next().unwrap();
    let endpoint = endpoint_info(slice, &slice.endpoints[0]).endpoint.unwrap();
    assert_eq!(endpoint.scopes, Some(localv1::EndpointScopes::default()), "a required field");
    let node = node_info(cluster.nodes.get("n1").unwrap()).node.unwrap();
    assert_eq!(node.name, "n1");
    assert_eq!(node.labels, BTreeMap::from([("topology.kubernetes.io/zone".into(), "a".into())]));
    assert_eq!(node.topology, Some(TopologyInfo { node: "n1".into(), zone: "a".into() }));
    let service = Service::clone(cluster.services.get(&ServiceName::new("ns", "web")).unwrap());
    let mut service = Service { metadata: None, ..service };
    service.source_ranges.push("2001:db8::/32".parse().unwrap());
    let service = service_info(&service, None).service.unwrap();
    assert_eq!(
        service.labels,
        BTreeMap::from([("service.kubernetes.io/service-proxy-name".into(), "other".into())])
    );
    let ranges: Vec<_> = service.ip_filters.iter().map(|it| &it.source_ranges).collect();
    assert_eq!(ranges, [&["198.51.100.0/24"]]);
}

#[test]
fn a_hash_is_that_of_the_content() {
    let cluster = full_cluster();
    let service = Service::clone(cluster.services.get(&ServiceName::new("ns", "web")).unwrap());
    let hash = |it: &Service| service_info(it, None).hash;
    assert_eq!(hash(&service), hash(&service.clone()));
    assert_ne!(hash(&service), hash(&Service { created: None, ..service.clone() }));
    let slice = cluster.slices().next().unwrap();
    let [a, b] = [0, 1].map(|it| endpoint_info(slice, &slice.endpoints[it]).hash);
    assert_ne!(a, b);
    let node = cluster.nodes.get("n1").unwrap();
    assert_ne!(node_info(node).hash, node_info(&Node { zone: None, ..Node::clone(node) }).hash);
}

#[test]
fn an_endpoint_has_the_same_key_wherever_it_is_in_the_slice() {
    let endpoint = |address: &str, pod: &str| Endpoint {
        pod: Some(pod.into()),
        ..Endpoint::new(address.parse().unwrap())
    };
    let all = [
        endpoint("10.1.0.2", "c"),
        endpoint("10.1.0.1", "b"),
        endpoint("10.1.0.1", "a"),
        endpoint("10.1.0.2", "c"),
    ];
    let mut slice = slice("web-a", Family::V4);
    for order in [[0, 1, 2, 3], [3, 2, 1, 0]] {
        slice.endpoints = order.map(|it: usize| all[it].clone()).into();
        let keys = endpoints_by_key(&slice);
        let found: Vec<_> = keys.iter().map(|(key, it)| (key.as_str(), it.pod.as_deref())).collect();
        assert_eq!(found, [("10.1.0.1", Some("a")), ("10.1.0.1+1", Some("b")), ("10.1.0.2", Some("c"))]);
    }
}

#[test]
fn a_slice_that_another_service_has_taken_stays_when_the_first_one_ends() {
    let of = |name: &str| {
        let mut message = ServiceInfo::clone(&service(vec![port("", 80, 8080, "")]));
        message.service.as_mut().unwrap().name = name.into();
        cluster_service(message, vec![ready("10.1.0.1")])
    };
    let with = |services: &[(&str, &Arc<ClusterService>)]| {
        let services = services.iter().map(|(path, it)| ((*path).into(), Arc::clone(it)));
        Cluster { services: services.collect(), ..Cluster::default() }
    };
    let (a, b) = (of("a"), of("b"));
    let mut decoder = Downstream::default();
    decoder.decode(&with(&[("ns/a", &a)]));
    // Both name the same slice, and the last one has it.
    decoder.decode(&with(&[("ns/a", &a), ("ns/b", &b)]));
    let state = decoder.decode(&with(&[("ns/b", &b)]));
    assert_eq!(state.slices().map(|it| it.service.to_string()).collect::<Vec<_>>(), ["ns/b"]);
    assert_eq!(state.services.keys().map(ToString::to_string).collect::<Vec<_>>(), ["ns/b"]);
    assert_eq!(*decoder.decode(&with(&[])), ClusterState::default());
}
