//! Messages of KPNG's brain, and invalid ones. Round trips are tested over real streams, in `publish`.

use std::{collections::BTreeMap, sync::Arc};

use brain::{Options, node_state};
use model::{
    RequestedMetadata, ServiceName,
    cluster::{ClusterState, Conditions},
    state::{NodeState, Scope},
};
use proxy_contract::{
    client::{Cluster, ClusterService},
    globalv1::{self, EndpointConditions, EndpointInfo, NodeInfo, ServiceInfo, TopologyHints, TopologyInfo},
    localv1::{self, IpSet, PortMapping, PortName, Protocol},
};

use super::{ClusterDecoder, service_with_slices};

fn ips(v4: &[&str], v6: &[&str]) -> IpSet {
    let texts = |it: &[&str]| it.iter().map(ToString::to_string).collect();
    IpSet { v4: texts(v4), v6: texts(v6) }
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
            cluster_ips: Some(ips(&["10.96.0.1"], &["fd00::1"])),
            external_ips: Some(ips(&[], &[])),
            ..Default::default()
        }),
        ports,
        ..Default::default()
    };
    ServiceInfo { hash: 1, service: Some(service), ..ServiceInfo::default() }
}

fn endpoint(addresses: IpSet, overrides: &[(&str, i32)], node: &str, ready: bool) -> EndpointInfo {
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
            ips: Some(addresses),
            port_overrides: overrides.collect(),
            ..Default::default()
        }),
        conditions: Some(EndpointConditions { ready, serving: None, terminating: None }),
        topology: Some(TopologyInfo { node: node.into(), zone: String::new() }),
        ..EndpointInfo::default()
    }
}

fn cluster_service(service: ServiceInfo, endpoints: Vec<EndpointInfo>) -> Arc<ClusterService> {
    let endpoints = endpoints.into_iter().enumerate();
    let endpoints = endpoints.map(|(at, it)| (format!("web-1|{at}").into(), Arc::new(it))).collect();
    Arc::new(ClusterService { service, endpoints })
}

fn cluster(service: Arc<ClusterService>) -> Cluster {
    let services = BTreeMap::from([("ns/web".into(), service)]);
    Cluster { services, ..Cluster::default() }
}

fn state_of(cluster: &ClusterState, node: &str) -> NodeState {
    node_state(cluster, node, &Options::default())
}

/// The targets of each port on a node without endpoints.
fn targets(cluster: &ClusterState) -> Vec<Vec<String>> {
    let state = state_of(cluster, "elsewhere");
    let Some(it) = state.services.get(&ServiceName::new("ns", "web")) else { return Vec::new() };
    let families = [model::Family::V4, model::Family::V6];
    let of = |port| families.into_iter().flat_map(move |family| it.targets(port, family, Scope::Internal));
    (0..it.service.ports.len()).map(|port| of(port).map(|it| it.to_string()).collect()).collect()
}

#[test]
fn ports_of_kpng_are_found_by_name_or_have_the_number_of_the_service() {
    let check = |ports: Vec<PortMapping>, overrides: &[(&str, i32)], expect: &[&str]| {
        let count = ports.len();
        let one = endpoint(ips(&["10.1.0.1"], &[]), overrides, "n1", true);
        let state = ClusterDecoder::default().decode(&cluster(cluster_service(service(ports), vec![one])));
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
}

#[test]
fn absent_conditions_have_the_defaults_of_kubernetes() {
    let ready = endpoint(ips(&["10.1.0.1"], &[]), &[("", 8080)], "n1", true);
    let unready = endpoint(ips(&["10.1.0.2"], &[]), &[("", 8080)], "n1", false);
    let absent =
        EndpointInfo { conditions: None, ..endpoint(ips(&["10.1.0.3"], &[]), &[("", 8080)], "n1", false) };
    let it = cluster_service(service(vec![port("", 80, 8080, "")]), vec![ready, unready, absent]);
    let (_, slices) = service_with_slices(&it, &RequestedMetadata::default()).value.unwrap();
    let conditions: Vec<_> = slices[0].endpoints.iter().map(|it| it.conditions).collect();
    let of = |ready| Conditions { ready, serving: true, terminating: false };
    assert_eq!(conditions, [of(true), of(false), of(true)]);
    // Without the condition terminating, an endpoint that is not ready is no fallback.
    let state = ClusterDecoder::default().decode(&cluster(it));
    assert_eq!(targets(&state), [["10.1.0.1:8080", "10.1.0.3:8080"]]);
}

#[test]
fn both_families_of_one_message_are_served() {
    let both = endpoint(ips(&["10.1.0.1"], &["fd00:1::1"]), &[("", 8080)], "n1", true);
    let it = cluster_service(service(vec![port("", 80, 8080, "")]), vec![both]);
    let state = ClusterDecoder::default().decode(&cluster(it));
    assert_eq!(targets(&state), [["10.1.0.1:8080", "[fd00:1::1]:8080"]]);
}

#[test]
fn hints_and_zones_of_kpng_are_used() {
    let hinted = |address: &str, zone: &str| EndpointInfo {
        hints: Some(TopologyHints { zones: vec![zone.into()], nodes: Vec::new() }),
        ..endpoint(ips(&[address], &[]), &[("", 8080)], "n1", true)
    };
    let it = cluster_service(
        service(vec![port("", 80, 8080, "")]),
        vec![hinted("10.1.0.1", "a"), hinted("10.1.0.2", "b")],
    );
    let node = |zone: &str, label: &str| globalv1::Node {
        name: "elsewhere".into(),
        labels: BTreeMap::from([("topology.kubernetes.io/zone".into(), label.into())]),
        topology: Some(TopologyInfo { node: String::new(), zone: zone.into() }),
        ..globalv1::Node::default()
    };
    for (zone, label, expect) in [("a", "", "10.1.0.1:8080"), ("", "b", "10.1.0.2:8080")] {
        let info = NodeInfo { hash: 1, node: Some(node(zone, label)) };
        let nodes = BTreeMap::from([("elsewhere".into(), Arc::new(info))]);
        let state = ClusterDecoder::default().decode(&Cluster { nodes, ..cluster(Arc::clone(&it)) });
        assert_eq!(targets(&state), [[expect]]);
    }
}

#[test]
fn an_invalid_field_is_rejected_and_the_rest_is_used() {
    let good = endpoint(ips(&["10.1.0.1"], &[]), &[("", 8080)], "n1", true);
    let no_address = EndpointInfo { endpoint: None, ..good.clone() };
    let invalid_port = endpoint(ips(&["10.1.0.2"], &[]), &[("", 70_000)], "n1", true);
    let invalid_address = endpoint(ips(&["10.1.0.300"], &[]), &[("", 8080)], "n1", true);
    let it = cluster_service(
        service(vec![port("", 80, 8080, "")]),
        vec![good, no_address, invalid_port, invalid_address],
    );
    let decoded = service_with_slices(&it, &RequestedMetadata::default());
    assert_eq!(decoded.rejected.len(), 4, "{:?}", decoded.rejected);
    let state = ClusterDecoder::default().decode(&cluster(it));
    assert_eq!(targets(&state), [["10.1.0.1:8080"]]);
    // No Service, and one with an invalid name.
    for invalid in [
        ServiceInfo::default(),
        ServiceInfo {
            service: Some(localv1::Service { name: "a|b".into(), ..Default::default() }),
            ..Default::default()
        },
    ] {
        let it = cluster_service(invalid, vec![endpoint(ips(&["10.1.0.1"], &[]), &[("", 8080)], "n1", true)]);
        assert_eq!(*ClusterDecoder::default().decode(&cluster(it)), ClusterState::default());
    }
}

#[test]
fn an_unchanged_object_stays_the_same_object() {
    let ports = || vec![port("", 80, 8080, "")];
    let at = |source: &str, address: &str| EndpointInfo {
        source_name: source.into(),
        ..endpoint(ips(&[address], &[]), &[("", 8080)], "n1", true)
    };
    let mut decoder = ClusterDecoder::default();
    let before = decoder
        .decode(&cluster(cluster_service(service(ports()), vec![at("a", "10.1.0.1"), at("b", "10.1.0.2")])));
    let after = decoder
        .decode(&cluster(cluster_service(service(ports()), vec![at("a", "10.1.0.1"), at("b", "10.1.0.3")])));
    let name = ServiceName::new("ns", "web");
    assert!(Arc::ptr_eq(before.service(&name).unwrap(), after.service(&name).unwrap()));
    let same: Vec<_> =
        before.slices_of(&name).zip(after.slices_of(&name)).map(|(a, b)| Arc::ptr_eq(a, b)).collect();
    assert_eq!(same, [true, false]);
    // A removed object leaves no trace.
    assert_eq!(*decoder.decode(&Cluster::default()), ClusterState::default());
}
