//! Encoded messages, as clients of other brains rely on them.

use std::{net::Ipv4Addr, sync::Arc};

use model::state::EndpointPort;

use super::*;

fn number(port: u16) -> NonZeroU16 {
    NonZeroU16::new(port).unwrap()
}

/// A Service with ports of these names and targets, and an endpoint for each list of its ports.
fn named_state(ports: &[(&str, TargetPort)], endpoints: &[&[(u16, u16)]]) -> ServiceState {
    let mut service = Service::new(ServiceName::new("ns", "svc"));
    service.cluster_ips = vec!["10.96.0.1".parse().unwrap()];
    service.ports = (80..)
        .zip(ports)
        .map(|(port, (name, target_port))| ServicePort {
            name: (*name).into(),
            target_port: target_port.clone(),
            ..ServicePort::new(Protocol::Tcp, number(port))
        })
        .collect();
    let scopes = Scopes { internal: true, external: true, cluster: true };
    let endpoints = endpoints.iter().enumerate().map(|(key, ports)| Endpoint {
        v4: Some(Ipv4Addr::new(10, 1, 0, 1)),
        ports: ports
            .iter()
            .map(|(index, port)| EndpointPort { index: *index, port: number(*port), scopes })
            .collect(),
        ..Endpoint::new(EndpointKey::Pod(format!("pod-{key}").into()))
    });
    ServiceState::new(service, endpoints.collect::<Vec<_>>())
}

#[test]
fn the_number_of_a_named_target_is_sent_where_all_endpoints_agree() {
    let [web, metrics] = ["web", "metrics"].map(|it| TargetPort::Name(it.into()));
    let ports = [("a", TargetPort::Number(number(7))), ("b", web), ("c", metrics.clone()), ("d", metrics)];
    let state = named_state(&ports, &[&[(0, 7), (1, 8080), (2, 1)], &[(0, 7), (1, 8080), (2, 2)]]);
    assert_eq!(named_targets(&state), [(1, Some(number(8080))), (2, None), (3, None)]);
    let message = service_with_extensions(&state, Extensions::default());
    assert_eq!(message.ports.iter().map(|it| it.target_port).collect::<Vec<_>>(), [7, 8080, 0, 0]);
}

#[test]
fn a_port_of_an_endpoint_has_the_name_by_which_a_backend_of_kpng_looks_it_up() {
    let [http, dns] = ["http", "dns"].map(|it| TargetPort::Name(it.into()));
    let ports = [("web", http), ("", dns), ("", TargetPort::Number(number(7)))];
    let state = named_state(&ports, &[&[(0, 1), (1, 2), (2, 3)]]);
    let message = endpoint(&state.service, &state.endpoints[0]);
    assert_eq!(
        message.port_overrides.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(),
        ["web", "dns", ""]
    );
    assert_eq!(
        message.port_overrides.iter().map(|it| it.scopes).collect::<Vec<_>>(),
        [None; 3],
        "all are alike"
    );
    assert_eq!(endpoint_path(&state.service.name, &state.endpoints[0]), "ns/svc/pod-0");
}

#[test]
fn an_endpoint_has_the_scopes_that_any_of_its_ports_has() {
    let mut state = named_state(&[("a", TargetPort::Number(number(7)))], &[&[(0, 1), (1, 2)]]);
    let one = |index| [index == 0, index == 1, index == 2];
    let scopes = |[internal, external, cluster]: [bool; 3]| Scopes { internal, external, cluster };
    for (a, b) in [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)] {
        let own = Arc::make_mut(&mut state.endpoints[0]);
        let ports = Arc::make_mut(&mut own.ports);
        (ports[0].scopes, ports[1].scopes) = (scopes(one(a)), scopes(one(b)));
        let message = endpoint(&state.service, &state.endpoints[0]);
        let of = |it: localv1::EndpointScopes| [it.internal, it.external, it.cluster.unwrap()];
        assert_eq!(
            message.port_overrides.iter().map(|it| of(it.scopes.unwrap())).collect::<Vec<_>>(),
            [a, b].map(one)
        );
        assert_eq!(of(message.scopes.unwrap()), [0, 1, 2].map(|it| it == a || it == b));
    }
}

#[test]
fn conflicting_addresses_are_left_out_for_a_client_without_the_extension() {
    let ips = |texts: &[&str]| texts.iter().map(|it| it.parse().unwrap()).collect::<Vec<IpAddr>>();
    let set = |texts: &[&str]| localv1::IpSet::of(texts);
    let mut state =
        named_state(&[("a", TargetPort::Number(number(7))), ("b", TargetPort::Number(number(8)))], &[]);
    let changed = Arc::make_mut(&mut state.service);
    changed.external_ips = ips(&["192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2"]);
    changed.load_balancer_ips = ips(&["192.0.2.3", "2001:db8::3", "2001:db8::4"]);
    changed.source_ranges = vec!["198.51.100.0/24".parse().unwrap(), "2001:db8:1::/48".parse().unwrap()];
    let filters = |message: &localv1::Service| {
        let filters = message.ip_filters.iter();
        filters.map(|it| (it.target_ips.clone().unwrap(), it.source_ranges.clone())).collect::<Vec<_>>()
    };
    let ranges = ["198.51.100.0/24", "2001:db8:1::/48"].map(|it| vec![it.to_owned()]);
    let [v4_ranges, v6_ranges] = &ranges;
    let without = service_with_extensions(&state, Extensions::default());
    let both =
        [(set(&["192.0.2.3"]), v4_ranges.clone()), (set(&["2001:db8::3", "2001:db8::4"]), v6_ranges.clone())];
    assert_eq!(filters(&without), both);

    let changed = Arc::make_mut(&mut state.service);
    changed.ports[0].conflicting_addresses = ips(&["192.0.2.1", "192.0.2.3", "2001:db8::2"]);
    changed.ports[1].conflicting_addresses = ips(&["2001:db8::4"]);
    let with = service_with_extensions(&state, Extensions::LOCAL);
    assert_eq!(filters(&with), both);
    assert_eq!(with.ips, without.ips);
    let conflicting: Vec<_> = with.ports.iter().map(|it| it.conflicting_addresses.clone().unwrap()).collect();
    assert_eq!(conflicting, [set(&["192.0.2.1", "192.0.2.3", "2001:db8::2"]), set(&["2001:db8::4"])]);
    let without = service_with_extensions(&state, Extensions::default());
    assert_eq!(
        without.ports.iter().map(|it| it.conflicting_addresses.clone()).collect::<Vec<_>>(),
        [None, None]
    );
    let found = without.ips.clone().unwrap();
    assert_eq!(found.cluster_ips, Some(set(&["10.96.0.1"])));
    assert_eq!(found.external_ips, Some(set(&["192.0.2.2", "2001:db8::1"])));
    assert_eq!(found.load_balancer_ips, Some(set(&["2001:db8::3"])));
    // A filter without targets is left out.
    assert_eq!(filters(&without), [(set(&["2001:db8::3"]), v6_ranges.clone())]);
}
