//! What the scenarios in `tests/scenarios` cannot show: options, keys and marks of endpoints.

use std::num::NonZeroU32;

use model::{
    Family, Protocol,
    cluster::Service,
    state::{EndpointKey, PortTarget, Scope, ServiceKind, TrafficPolicy},
};

use super::*;

const LOCAL: TrafficPolicy = TrafficPolicy::Local;

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
fn one_address_with_a_target_for_each_port_is_one_endpoint() {
    let ports = [("a", 80, 8080), ("b", 81, 8081), ("c", 82, 8082)];
    let mut service = service();
    service.ports = ports.map(|(name, port, _)| service_port(name, Protocol::Tcp, port)).into();
    let port = |(name, _, port): (&str, _, _)| SlicePort {
        name: name.into(),
        protocol: Protocol::Tcp,
        port: number(port),
    };
    let slice = EndpointSlice { ports: ports.map(port).into(), ..slice([at("10.1.0.1")]) };
    let state = state(&service, &[slice]);
    assert_eq!(state.endpoints.len(), 1);
    assert_eq!(
        state.endpoints[0].ports.iter().map(|it| it.port.get()).collect::<Vec<_>>(),
        [8080, 8081, 8082]
    );
}

#[test]
fn of_two_copies_of_an_endpoint_one_that_is_not_terminating_counts() {
    let selected = |copies: [Endpoint; 2]| {
        let state_of = |[a, b]: [Endpoint; 2]| {
            state(&service(), &[slice([a]), slice_named("web-2", Family::V4, vec![b])])
        };
        let [a, b] = copies;
        let state = state_of([a.clone(), b.clone()]);
        assert_eq!(state, state_of([b, a]), "the order of the slices does not matter");
        (targets(&state, 0, Scope::Internal), state.service.ports[0].has_any_endpoint.v4)
    };
    // The address of a pod that is terminating was given to a new one.
    let old = || terminating(pod(at("10.1.0.1"), "old"));
    let new = || pod(at("10.1.0.1"), "new");
    assert_eq!(selected([old(), unready(new())]), (String::new(), false));
    assert_eq!(selected([old(), new()]), ("1".into(), true));
    // Ready although it is terminating (publishNotReadyAddresses).
    let mut published = old();
    published.conditions.ready = true;
    assert_eq!(selected([published.clone(), unready(new())]), (String::new(), false));
    assert_eq!(selected([published, old()]), ("1".into(), true));
    assert_eq!(selected([unready(new()), new()]), ("1".into(), true));
}

/// The same Service and slice for UDP.
fn over_udp(mut service: Service, endpoints: impl Into<Vec<Endpoint>>) -> ServiceState {
    let mut slice = slice(endpoints);
    service.ports[0].protocol = Protocol::Udp;
    slice.ports[0].protocol = Protocol::Udp;
    state(&service, &[slice])
}

fn other_serving(state: &ServiceState) -> Vec<String> {
    listed(&state.other_serving)
}

fn listed(targets: &[PortTarget]) -> Vec<String> {
    targets.iter().map(|it| format!("{} {}", it.index, it.target)).collect()
}

#[test]
fn udp_and_drained_endpoints_that_serve_unselected_are_listed() {
    let endpoints = [here("10.1.0.1"), terminating(at("10.1.0.2")), unready(at("10.1.0.3"))];
    assert_eq!(other_serving(&over_udp(service(), endpoints.clone())), ["0 10.1.0.2:8080"]);
    let hinted = [zones(at("10.1.0.5"), &["b"]), zones(here("10.1.0.1"), &["a"])];
    assert_eq!(other_serving(&over_udp(service(), hinted)), ["0 10.1.0.5:8080"]);
    // TCP connections continue in any case, unless the Service drains.
    assert_eq!(other_serving(&state(&service(), &[slice(endpoints.clone())])), [""; 0]);
    let mut drained = service();
    drained.load_balancing.drain = NonZeroU32::new(30);
    assert_eq!(other_serving(&state(&drained, &[slice(endpoints)])), ["0 10.1.0.2:8080"]);
}

#[test]
fn udp_endpoints_that_are_there_and_do_not_serve_are_listed() {
    let mut ending = terminating(at("10.1.0.2"));
    ending.conditions.serving = false;
    let endpoints = [here("10.1.0.1"), ending, unready(at("10.1.0.3")), terminating(at("10.1.0.4"))];
    let udp = over_udp(service(), endpoints.clone());
    assert_eq!(listed(&udp.not_serving), ["0 10.1.0.2:8080", "0 10.1.0.3:8080"]);
    assert_eq!(state(&service(), &[slice(endpoints)]).not_serving[..], []);
}

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
fn addresses_and_source_ranges_of_ipv4_come_first() {
    let mut service = Service { kind: Some(ServiceKind::LoadBalancer), ..service() };
    let ips = |texts: [&str; 3]| texts.map(|it| it.parse().unwrap()).to_vec();
    service.external_ips = ips(["2001:db8::1", "192.0.2.2", "192.0.2.1"]);
    service.load_balancer_ips = ips(["2001:db8::2", "192.0.2.4", "192.0.2.3"]);
    service.source_ranges =
        ["2001:db8::/32", "198.51.100.0/24", "10.0.0.0/8"].map(|it| it.parse().unwrap()).to_vec();
    let state = state(&service, &[]);
    assert_eq!(state.service.external_ips, ips(["192.0.2.2", "192.0.2.1", "2001:db8::1"]));
    assert_eq!(state.service.load_balancer_ips, ips(["192.0.2.4", "192.0.2.3", "2001:db8::2"]));
    let ranges: Vec<_> = state.service.source_ranges.iter().map(ToString::to_string).collect();
    assert_eq!(ranges, ["198.51.100.0/24", "10.0.0.0/8", "2001:db8::/32"]);
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
fn an_anonymous_key_is_the_same_in_every_build() {
    let state = state(&service(), &[slice([at("10.1.0.1")])]);
    assert_eq!(state.endpoints[0].key, EndpointKey::Anonymous("@48cf66649cd26ca7".into()));
}
