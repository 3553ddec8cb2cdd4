//! One test for each rule of how Services and slices are read.

use model::{
    Family, Protocol,
    cluster::{Service, SlicePort},
    state::{EndpointKey, Scope, ServiceKind, TrafficPolicy},
};

use super::*;
use crate::node_state;

const LOCAL: TrafficPolicy = TrafficPolicy::Local;

fn is_served(service: &Service, options: &Options) -> bool {
    service_state(service, [], NODE, options).is_some()
}

// Which Services and slices are used.

#[test]
fn external_names_are_not_served() {
    assert!(!is_served(&Service { kind: None, ..service() }, &Options::default()));
}

#[test]
fn a_service_without_a_cluster_ip_is_not_served() {
    assert!(!is_served(&Service { cluster_ips: Vec::new(), ..service() }, &Options::default()));
}

#[test]
fn a_service_without_endpoints_is_served() {
    assert!(is_served(&service(), &Options::default()));
}

#[test]
fn a_service_of_another_proxy_is_not_served() {
    let labelled = Service { proxy_name: Some("mesh".into()), ..service() };
    let empty = Service { proxy_name: Some(String::new()), ..service() };
    let named = Options { service_proxy_name: Some("mesh".into()), ..Options::default() };
    let served = |it: &Service| (is_served(it, &Options::default()), is_served(it, &named));
    assert_eq!(served(&service()), (true, false));
    assert_eq!(served(&labelled), (false, true));
    assert_eq!(served(&empty), (false, false));
}

#[test]
fn headless_slices_are_ignored() {
    let headless = EndpointSlice { headless: true, ..slice([at("10.1.0.1")]) };
    check_internal(&[headless, slice([at("10.1.0.2")])], "2");
}

#[test]
fn slices_of_other_services_are_ignored() {
    let other = EndpointSlice { service: ServiceName::new("ns", "other"), ..slice([at("10.1.0.1")]) };
    let state = node_state(&cluster(&service(), &[other]), "n1", &Options::default());
    assert!(state.services.values().all(|it| it.endpoints.is_empty()));
}

#[test]
fn of_an_address_in_two_slices_the_ready_copy_is_used() {
    let slices = [
        slice([at("10.1.0.1"), unready(at("10.1.0.2"))]),
        slice_named("web-2", Family::V4, vec![unready(at("10.1.0.1")), at("10.1.0.2")]),
    ];
    check_internal(&slices, "1 2");
}

#[test]
fn a_serving_terminating_copy_is_preferred_to_an_unready_one() {
    let slices = [
        slice([unready(at("10.1.0.1"))]),
        slice_named("web-2", Family::V4, vec![terminating(at("10.1.0.1"))]),
    ];
    check_internal(&slices, "1");
}

#[test]
fn ports_match_by_name_and_protocol() {
    let mut service = service();
    service.ports = vec![
        service_port("dns", Protocol::Udp, 53),
        service_port("dns", Protocol::Tcp, 53),
        service_port("", Protocol::Tcp, 80),
    ];
    let mut slice = slice([at("10.1.0.1")]);
    slice.ports = vec![
        SlicePort { name: "dns".into(), protocol: Protocol::Udp, port: number(1) },
        SlicePort { name: String::new(), protocol: Protocol::Tcp, port: number(2) },
        SlicePort { name: "other".into(), protocol: Protocol::Tcp, port: number(3) },
    ];
    let state = state(&service, &[slice]);
    let found = [0, 1, 2].map(|port| targets(&state, port, Scope::Internal));
    assert_eq!(found, ["1@1", "", "1@2"]);
}

#[test]
fn the_target_port_comes_from_the_slice_of_the_endpoint() {
    let mut other = slice_named("web-2", Family::V4, vec![at("10.1.0.2")]);
    other.ports[0].port = number(9090);
    check_internal(&[slice([at("10.1.0.1")]), other], "1 2@9090");
}

#[test]
fn one_address_with_two_targets_is_two_endpoints() {
    let mut other = slice_named("web-2", Family::V4, vec![pod(at("10.1.0.1"), "p")]);
    other.ports[0].port = number(9090);
    let state = state(&service(), &[slice([pod(at("10.1.0.1"), "p")]), other]);
    assert_eq!(targets(&state, 0, Scope::Internal), "1 1@9090");
    let keys: Vec<_> = state.endpoints.iter().map(|it| matches!(&it.key, EndpointKey::Pod(_))).collect();
    assert_eq!(keys, [true, false]);
}

#[test]
fn an_endpoint_is_local_if_it_is_on_this_node() {
    let endpoints = [here("10.1.0.1"), at("10.1.0.2"), Endpoint { node: None, ..at("10.1.0.3") }];
    let local: Vec<_> =
        state(&service(), &[slice(endpoints)]).endpoints.iter().map(|it| (it.v4, it.local)).collect();
    let mut local: Vec<_> = local.into_iter().filter(|(_, local)| *local).collect();
    assert_eq!(local.pop().and_then(|(ip, _)| ip), Some("10.1.0.1".parse().unwrap()));
    assert!(local.is_empty());
}

#[test]
fn an_unknown_node_gets_a_state_too() {
    let cluster = cluster(&service(), &[slice([zones(at("10.1.0.1"), &["b"])])]);
    let state = node_state(&cluster, "unknown", &Options::default());
    assert_eq!(state.services.values().map(|it| it.endpoints.len()).collect::<Vec<_>>(), [1]);
}

#[test]
fn the_zone_comes_from_the_node() {
    let endpoints = [zones(at("10.1.0.1"), &["a"]), zones(at("10.1.0.2"), &["b"])];
    let mut cluster = cluster(&service(), &[slice(endpoints)]);
    cluster.set_node(node("n1", Some("b")));
    let state = node_state(&cluster, "n1", &Options::default());
    let state = state.services.values().next().unwrap();
    assert_eq!(targets(state, 0, Scope::Internal), "2");
}

// Endpoints that serve and are not selected.

/// The same Service and slice for UDP.
fn over_udp(mut service: Service, endpoints: impl Into<Vec<Endpoint>>) -> ServiceState {
    let mut slice = slice(endpoints);
    service.ports[0].protocol = Protocol::Udp;
    slice.ports[0].protocol = Protocol::Udp;
    state(&service, &[slice])
}

fn other_serving(state: &ServiceState) -> Vec<String> {
    state.other_serving.iter().map(|it| format!("{} {}", it.index, it.target)).collect()
}

#[test]
fn udp_endpoints_that_serve_unselected_are_listed() {
    let endpoints = [here("10.1.0.1"), terminating(at("10.1.0.2")), unready(at("10.1.0.3"))];
    assert_eq!(other_serving(&over_udp(service(), endpoints.clone())), ["0 10.1.0.2:8080"]);
    let hinted = [zones(at("10.1.0.5"), &["b"]), zones(here("10.1.0.1"), &["a"])];
    assert_eq!(other_serving(&over_udp(service(), hinted)), ["0 10.1.0.5:8080"]);
    // TCP connections continue in any case.
    assert_eq!(other_serving(&state(&service(), &[slice(endpoints)])), [""; 0]);
}

// Frontends.

#[test]
fn a_family_without_a_cluster_ip_has_no_frontends() {
    let mut service = with_node_port();
    service.cluster_ips.truncate(1);
    service.external_ips = vec!["2001:db8::1".parse().unwrap(), "192.0.2.1".parse().unwrap()];
    service.load_balancer_ips = service.external_ips.clone();
    service.source_ranges = vec!["::/0".parse().unwrap(), "10.0.0.0/8".parse().unwrap()];
    let state = state(&service, &[slice_named("web-6", Family::V6, vec![at("fd00:1::1")])]).service;
    assert_eq!(state.external_ips, ["192.0.2.1".parse::<std::net::IpAddr>().unwrap()]);
    assert_eq!(state.load_balancer_ips, state.external_ips);
    assert_eq!(state.source_ranges, ["10.0.0.0/8".parse::<ipnet::IpNet>().unwrap()]);
    assert!(!state.ports[0].has_any_endpoint.v6);
}

#[test]
fn external_ips_can_be_turned_off() {
    let service =
        Service { external_ips: vec!["192.0.2.1".parse().unwrap()], external_policy: LOCAL, ..service() };
    let options = Options { external_ips: false, ..Options::default() };
    let state = service_state(&service, &[slice([here("10.1.0.1")])], NODE, &options).unwrap();
    assert!(state.service.external_ips.is_empty());
    assert_eq!(targets(&state, 0, Scope::External), "");
}

#[test]
fn reachability_of_one_family_does_not_affect_the_other() {
    let service = Service { external_ips: vec!["2001:db8::1".parse().unwrap()], ..service() };
    let slices = [slice([at("10.1.0.1")]), slice_named("web-6", Family::V6, vec![at("fd00:1::1")])];
    let state = state(&service, &slices);
    assert_eq!(targets(&state, 0, Scope::External), "v6:1");
    assert_eq!(targets(&state, 0, Scope::Internal), "1 v6:1");
}

#[test]
fn reachability_of_one_port_does_not_affect_another() {
    let mut service = with_node_port();
    service.ports.push(service_port("", Protocol::Udp, 80));
    let mut slice = slice([at("10.1.0.1")]);
    slice.ports.push(SlicePort { protocol: Protocol::Udp, ..slice.ports[0].clone() });
    let state = state(&service, &[slice]);
    assert_eq!([0, 1].map(|port| targets(&state, port, Scope::External)), ["1", ""]);
}

#[test]
fn only_a_load_balancer_with_policy_local_has_a_health_check_port() {
    let health = |kind, external_policy| {
        let kind = Some(kind);
        let health_check_node_port = Some(number(32000));
        let service = Service { kind, external_policy, health_check_node_port, ..with_node_port() };
        state(&service, &[]).service.health_check_node_port.is_some()
    };
    assert!(health(ServiceKind::LoadBalancer, LOCAL));
    assert!(!health(ServiceKind::LoadBalancer, TrafficPolicy::Cluster));
    assert!(!health(ServiceKind::NodePort, LOCAL));
}

// Selection: policies and fallbacks.

#[test]
fn cluster_policy_uses_every_ready_endpoint() {
    let endpoints = [here("10.1.0.1"), at("10.1.0.2"), unready(at("10.1.0.3"))];
    check(&service(), &endpoints, "1 2", "", "");
    check(&with_node_port(), &endpoints, "1 2", "1 2", "1 2");
}

#[test]
fn policy_local_uses_local_endpoints_and_the_short_circuit_all() {
    let endpoints = [here("10.1.0.1"), at("10.1.0.2")];
    check(&Service { internal_policy: LOCAL, ..service() }, &endpoints, "1", "", "");
    check(&Service { external_policy: LOCAL, ..service() }, &endpoints, "1 2", "", "");
    check(&Service { external_policy: LOCAL, ..with_node_port() }, &endpoints, "1 2", "1", "1 2");
    check(&Service { internal_policy: LOCAL, ..with_node_port() }, &endpoints, "1", "1 2", "1 2");
}

#[test]
fn serving_terminating_endpoints_are_used_only_if_none_is_ready() {
    check(&service(), &[terminating(at("10.1.0.1")), unready(at("10.1.0.2"))], "1", "", "");
    check(&service(), &[terminating(at("10.1.0.1")), at("10.1.0.2")], "2", "", "");
}

#[test]
fn terminating_endpoints_that_no_longer_serve_are_not_used() {
    let mut gone = terminating(at("10.1.0.1"));
    gone.conditions.serving = false;
    check(&service(), &[gone], "", "", "");
}

#[test]
fn cluster_and_local_fall_back_independently() {
    let service = Service { external_policy: LOCAL, ..with_node_port() };
    check(&service, &[terminating(here("10.1.0.1")), at("10.1.0.2")], "2", "1", "2");
}

#[test]
fn an_endpoint_selected_as_a_fallback_is_marked_serving_terminating() {
    let service = Service { external_policy: LOCAL, ..with_node_port() };
    let marks = |endpoints: &[Endpoint]| -> Vec<_> {
        let state = state(&service, &[slice(endpoints)]);
        state.endpoints.iter().map(|it| (it.local, it.serving_terminating)).collect()
    };
    assert_eq!(
        marks(&[terminating(pod(here("10.1.0.1"), "a")), pod(at("10.1.0.2"), "b")]),
        [(true, true), (false, false)]
    );
    assert_eq!(marks(&[terminating(here("10.1.0.1")), here("10.1.0.2")]), [(true, false)]);
    // Ready although it is terminating (publishNotReadyAddresses): no fallback.
    let mut wanted = here("10.1.0.1");
    wanted.conditions.terminating = true;
    assert_eq!(marks(&[wanted]), [(true, false)]);
}

#[test]
fn families_fall_back_independently() {
    let slices =
        [slice([at("10.1.0.1")]), slice_named("web-6", Family::V6, vec![terminating(at("fd00:1::2"))])];
    check_internal(&slices, "1 v6:2");
}

#[test]
fn has_any_endpoint_is_true_if_any_endpoint_could_serve() {
    let has_any = |endpoints: &[Endpoint]| {
        let service = Service { internal_policy: LOCAL, ..service() };
        state(&service, &[slice(endpoints)]).service.ports[0].has_any_endpoint.v4
    };
    assert!(has_any(&[at("10.1.0.1")]));
    assert!(has_any(&[terminating(at("10.1.0.1"))]));
    assert!(!has_any(&[unready(at("10.1.0.1"))]));
    assert!(!has_any(&[]));
}

// Selection: topology.

#[test]
fn zone_hints_select_this_zone() {
    let endpoints = [zones(at("10.1.0.1"), &["a", "b"]), zones(at("10.1.0.2"), &["b"])];
    check(&service(), &endpoints, "1", "", "");
}

#[test]
fn one_endpoint_without_a_hint_disables_hints() {
    check(&service(), &[zones(at("10.1.0.1"), &["a"]), at("10.1.0.2")], "1 2", "", "");
    check(&service(), &[nodes(at("10.1.0.1"), &["n1"]), at("10.1.0.2")], "1 2", "", "");
}

#[test]
fn hints_for_other_zones_only_are_ignored() {
    check(&service(), &[zones(at("10.1.0.1"), &["b"]), zones(at("10.1.0.2"), &["c"])], "1 2", "", "");
}

#[test]
fn hints_without_a_zone_are_ignored() {
    let endpoints = [zones(at("10.1.0.1"), &["a"]), zones(at("10.1.0.2"), &["b"])];
    let node = NodeView { zone: None, ..NODE };
    let state = service_state(&service(), &[slice(endpoints)], node, &Options::default()).unwrap();
    assert_eq!(targets(&state, 0, Scope::Internal), "1 2");
}

#[test]
fn node_hints_take_precedence_over_zone_hints() {
    let endpoints =
        [nodes(zones(at("10.1.0.1"), &["a"]), &["n2"]), nodes(zones(at("10.1.0.2"), &["b"]), &["n1"])];
    check(&service(), &endpoints, "2", "", "");
}

#[test]
fn without_a_matching_node_hint_zone_hints_are_used() {
    let endpoints =
        [nodes(zones(at("10.1.0.1"), &["a"]), &["n2"]), nodes(zones(at("10.1.0.2"), &["b"]), &["n3"])];
    check(&service(), &endpoints, "1", "", "");
}

#[test]
fn hints_of_endpoints_that_are_not_ready_are_ignored() {
    let endpoints = [zones(at("10.1.0.1"), &["b"]), zones(unready(at("10.1.0.2")), &["a"])];
    check(&service(), &endpoints, "1", "", "");
    let endpoints =
        [zones(at("10.1.0.1"), &["a"]), zones(at("10.1.0.2"), &["b"]), terminating(at("10.1.0.3"))];
    check(&service(), &endpoints, "1", "", "");
}

#[test]
fn hints_do_not_filter_the_fallback() {
    let endpoints = [zones(terminating(at("10.1.0.1")), &["a"]), zones(terminating(at("10.1.0.2")), &["b"])];
    check(&service(), &endpoints, "1 2", "", "");
}

#[test]
fn hints_do_not_filter_policy_local() {
    let endpoints = [zones(here("10.1.0.1"), &["b"]), zones(at("10.1.0.2"), &["a"])];
    check(&Service { external_policy: LOCAL, ..with_node_port() }, &endpoints, "2", "1", "2");
}

#[test]
fn hints_of_one_family_do_not_affect_the_other() {
    let v6 = slice_named("web-6", Family::V6, vec![at("fd00:1::1"), at("fd00:1::2")]);
    check_internal(
        &[slice([zones(at("10.1.0.1"), &["a"]), zones(at("10.1.0.2"), &["b"])]), v6],
        "1 v6:1 v6:2",
    );
}

// Endpoints and their keys.

#[test]
fn a_pod_with_the_same_ports_in_both_families_is_one_endpoint() {
    let v6 = slice_named("web-6", Family::V6, vec![pod(here("fd00:1::1"), "p")]);
    let state = state(&service(), &[slice([pod(here("10.1.0.1"), "p")]), v6]);
    let [endpoint] = state.endpoints.as_slice() else { panic!("{:?}", state.endpoints) };
    assert_eq!(endpoint.key, EndpointKey::Pod("p".into()));
    assert!(endpoint.v4.is_some() && endpoint.v6.is_some());
}

#[test]
fn a_pod_with_different_ports_per_family_is_two_endpoints() {
    let v6 = slice_named("web-6", Family::V6, vec![pod(here("fd00:1::1"), "p")]);
    let service = Service { external_ips: vec!["192.0.2.1".parse().unwrap()], ..service() };
    let state = state(&service, &[slice([pod(here("10.1.0.1"), "p")]), v6]);
    let keys: Vec<_> = state.endpoints.iter().map(|it| (it.key.clone(), it.v4.is_some())).collect();
    assert_eq!(keys.len(), 2);
    assert_eq!(keys[0], (EndpointKey::Pod("p".into()), true));
    assert!(matches!(&keys[1], (EndpointKey::Anonymous(_), false)));
}

#[test]
fn addresses_without_a_pod_are_separate_endpoints() {
    let v6 = slice_named("web-6", Family::V6, vec![at("fd00:1::1")]);
    assert_eq!(state(&service(), &[slice([at("10.1.0.1")]), v6]).endpoints.len(), 2);
}

#[test]
fn an_anonymous_key_is_the_same_in_every_build() {
    let state = state(&service(), &[slice([at("10.1.0.1")])]);
    assert_eq!(state.endpoints[0].key, EndpointKey::Anonymous("@48cf66649cd26ca7".into()));
}
