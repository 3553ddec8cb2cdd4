//! The messages of other brains.

use std::collections::BTreeMap;

use model::{
    RequestedMetadata, ServiceMetadata, escaped_line,
    state::{LoadBalancing, PassiveHealth},
};

use super::*;
use crate::encode;

/// The state of a Service with all its labels and annotations.
fn service_state<'a>(
    message: &localv1::Service,
    endpoints: impl IntoIterator<Item = (&'a str, &'a localv1::Endpoint)>,
) -> Decoded<Option<ServiceState>> {
    super::service_state(message, endpoints, &RequestedMetadata::everything())
}

/// A Service with one port, as KPNG's brain sends it.
fn kpng_service(port: localv1::PortMapping) -> localv1::Service {
    let ips =
        localv1::ServiceIPs { cluster_ips: Some(localv1::IpSet::of(["10.96.0.1"])), ..Default::default() };
    let port = localv1::PortMapping { protocol: localv1::Protocol::Tcp.into(), port: 443, ..port };
    localv1::Service {
        namespace: "ns".into(),
        name: "svc".into(),
        ips: Some(ips),
        ports: vec![port],
        ..Default::default()
    }
}

fn plain_service() -> localv1::Service {
    kpng_service(localv1::PortMapping::default())
}

fn kpng_endpoint(ports: &[(&str, i32)]) -> localv1::Endpoint {
    let ports = ports.iter().map(|(name, port)| localv1::PortName {
        name: (*name).to_owned(),
        port: *port,
        ..Default::default()
    });
    localv1::Endpoint {
        ips: Some(localv1::IpSet::of(["10.1.0.1"])),
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
fn load_balancer_ips_are_served_only_with_all_of_their_filters() {
    let set = |texts: &[&str]| localv1::IpSet::of(texts);
    let served = |filters: &[(&[&str], &[&str])]| {
        let mut service = plain_service();
        let ips = service.ips.as_mut().unwrap();
        ips.load_balancer_ips = Some(set(&["192.0.2.1", "192.0.2.2", "2001:db8::1"]));
        ips.external_ips = Some(set(&["192.0.2.1", "198.51.100.1"]));
        let filter = |(targets, ranges): &(&[&str], &[&str])| localv1::IpFilter {
            target_ips: Some(set(targets)),
            source_ranges: ranges.iter().map(|it| (*it).to_owned()).collect(),
        };
        service.ip_filters = filters.iter().map(filter).collect();
        let Decoded { value, rejected } = service_state(&service, []);
        let service = value.unwrap().service;
        let ips: Vec<_> = service.load_balancer_ips.iter().map(ToString::to_string).collect();
        let is_closed = !ips.contains(&"192.0.2.1".to_owned());
        assert_eq!(service.external_ips.len(), if is_closed { 1 } else { 2 }, "not by another list either");
        // That of the external IP is one more.
        (ips.join(" "), service.source_ranges.len(), rejected.len() - usize::from(is_closed))
    };
    let all = "192.0.2.1 192.0.2.2 2001:db8::1";
    let (v4, range): (&[_], &[_]) = (&["192.0.2.1", "192.0.2.2"], &["10.0.0.0/8"]);
    assert_eq!(served(&[]), (all.into(), 0, 0));
    assert_eq!(served(&[(v4, range)]), (all.into(), 1, 0));
    assert_eq!(served(&[(v4, range), (v4, &["10.0.0.0/8", "11.0.0.0/8"])]), (all.into(), 2, 0));
    // Open beside restricted, and two lists.
    assert_eq!(served(&[(&v4[..1], range)]), ("2001:db8::1".into(), 1, 1));
    assert_eq!(served(&[(&v4[..1], range), (&v4[1..], &["11.0.0.0/8"])]), ("2001:db8::1".into(), 2, 1));
    // No source may use them, or none that is known.
    assert_eq!(served(&[(v4, &[])]), ("2001:db8::1".into(), 0, 1));
    assert_eq!(served(&[(v4, &["10.0.0.5"])]), ("2001:db8::1".into(), 0, 2));
    // The filter of an external IP is not supported.
    let mut service = plain_service();
    service.ips.as_mut().unwrap().external_ips = Some(set(&["198.51.100.1"]));
    let filter = localv1::IpFilter { target_ips: Some(set(&["198.51.100.1"])), ..Default::default() };
    service.ip_filters = vec![filter];
    assert!(service_state(&service, []).value.unwrap().service.external_ips.is_empty());
    // As of a Service that has no load balancer IP of a family yet.
    assert_eq!(served(&[(&[], &["fd00::/8"])]), (all.into(), 1, 0));
}

#[test]
fn what_a_brain_does_not_say_has_its_default() {
    let endpoint = kpng_endpoint(&[("", 1)]);
    let state = service_state(&plain_service(), [("pod", &endpoint)]).value.unwrap();
    // Without the scope `cluster`, that has every usable endpoint.
    assert_eq!(state.endpoints[0].ports[0].scopes, Scopes { internal: true, external: false, cluster: true });
    assert!(!state.service.ports[0].has_any_endpoint.v4);
    assert_eq!(state.service.load_balancing, LoadBalancing::default());
    // And nothing is sent of them, so that an older backend receives the bytes that it always did.
    assert_eq!(encode::service(&state.service).load_balancing, None);
}

#[test]
fn load_balancing_is_used_up_to_its_largest_values_and_means_the_default_beyond_them() {
    let decode = |failures, max_ejected_percent, slow_start_seconds, drain_seconds, algorithm| {
        let (enabled, failures) = (Some(false), Some(failures));
        let max_ejected_percent = Some(max_ejected_percent);
        let load_balancing = localv1::LoadBalancing {
            algorithm,
            passive_health: Some(localv1::PassiveHealth { enabled, failures, max_ejected_percent }),
            slow_start_seconds,
            drain_seconds,
            ..localv1::LoadBalancing::default()
        };
        let message = localv1::Service { load_balancing: Some(load_balancing), ..plain_service() };
        let Decoded { value, rejected } = service_state(&message, []);
        (load_balancing, value.unwrap().service, rejected)
    };
    let (sent, service, rejected) = decode(50, 100, 3_600, 86_400, 0);
    assert_eq!(rejected, []);
    assert_eq!(encode::service(&service).load_balancing, Some(sent));
    for (failures, percent, slow_start_seconds, drain_seconds) in
        [(0, 0, 3_601, 86_401), (51, 101, 65_537, u32::MAX), (257, 257, u32::MAX, 86_401)]
    {
        let (_, service, rejected) = decode(failures, percent, slow_start_seconds, drain_seconds, 99);
        let passive_health = PassiveHealth { enabled: Some(false), ..PassiveHealth::default() };
        assert_eq!(service.load_balancing, LoadBalancing { passive_health, ..LoadBalancing::default() });
        let fields = ["algorithm", "passive_health.failures", "passive_health.max_ejected_percent"];
        let fields = fields.into_iter().chain(["slow_start_seconds", "drain_seconds"]);
        let expect = fields.map(|it| format!("service ns/svc: load_balancing.{it}"));
        assert!(rejected.iter().map(|it| it.item.clone()).eq(expect), "{rejected:?}");
    }
}

#[test]
fn a_port_is_not_forwarded_if_a_node_is_invalid() {
    let share = |&(node, endpoints): &(&str, _)| localv1::NodeShare { node: node.into(), endpoints };
    for (nodes, reason) in [
        (&[][..], "there is no node"),
        (&[("", 1)], "\"\" is not the name of a node"),
        (&[("n1", 1), ("A b", 1)], "\"A b\" is not the name of a node"),
        (&[("n1", 0)], "\"n1\" has no endpoint"),
        (&[("n1", 1), ("n1", 2)], "\"n1\" is listed twice"),
    ] {
        let forwarding =
            localv1::FamilyForwarding { nodes: nodes.iter().map(share).collect(), targets: Vec::new() };
        let forwarded = localv1::ForwardedPort { v4: None, v6: Some(forwarding) };
        let port = localv1::PortMapping { forwarded: Some(forwarded), ..localv1::PortMapping::default() };
        let decoded = service_state(&kpng_service(port), []);
        assert_eq!(*decoded.value.unwrap().forwarded, []);
        let found: Vec<_> = decoded.rejected.iter().map(ToString::to_string).collect();
        let expect =
            format!("service ns/svc: ports.forwarded: {reason}; the port is not forwarded over IPv6");
        assert_eq!(found, [expect]);
    }
}

#[test]
fn of_a_forwarded_port_the_targets_of_its_family_are_used() {
    let forwarding = localv1::FamilyForwarding {
        nodes: ["n2", "n1"].map(|node| localv1::NodeShare { node: node.into(), endpoints: 1 }).into(),
        targets: ["10.0.0.2:80", "10.0.0.1:80", "10.0.0.2:80", "[fd00::1]:80", "10.0.0.3", "0.0.0.0:80"]
            .map(Into::into)
            .into(),
    };
    let forwarded = localv1::ForwardedPort { v4: Some(forwarding), v6: None };
    let port = localv1::PortMapping { forwarded: Some(forwarded), ..localv1::PortMapping::default() };
    let decoded = service_state(&kpng_service(port), []);
    let state = decoded.value.unwrap();
    let [port] = &*state.forwarded else { panic!("{:?}", state.forwarded) };
    assert!(port.nodes.iter().map(|it| &*it.node).eq(["n1", "n2"]));
    assert!(port.targets.iter().map(ToString::to_string).eq(["10.0.0.1:80", "10.0.0.2:80"]));
    assert_eq!(decoded.rejected.len(), 3, "{:?}", decoded.rejected);
}

#[test]
fn a_rejection_shows_the_beginning_of_the_value() {
    let mut service = plain_service();
    let texts = vec!["\u{1b}x".to_owned(), "y".repeat(80), "y".repeat(81)];
    service.ips.as_mut().unwrap().external_ips = Some(localv1::IpSet::of(texts));
    let reasons: Vec<_> = service_state(&service, []).rejected.into_iter().map(|it| it.reason).collect();
    let is_none = |it: &str| format!("\"{it}\" is not a valid address or range");
    let long = "y".repeat(80);
    assert_eq!(reasons, [is_none("\\u{1b}x"), is_none(&long), is_none(&format!("{long}…"))]);
}

#[test]
fn a_service_without_a_valid_name_is_rejected() {
    for (namespace, name) in [("A b", "svc"), ("ns", "A b"), ("", "svc"), ("ns", "")] {
        let named = localv1::Service { namespace: namespace.into(), name: name.into(), ..plain_service() };
        let decoded = service_state(&named, []);
        assert_eq!((decoded.value, decoded.rejected.len()), (None, 1), "{namespace}/{name}");
    }
}

#[test]
fn ports_beyond_the_limit_are_rejected_together() {
    for (count, rejected) in [(20_000, 0), (20_001, 1)] {
        let mut service = plain_service();
        service.ports = (1..=count)
            .map(|port| localv1::PortMapping { protocol: 1, port, ..localv1::PortMapping::default() })
            .collect();
        let decoded = service_state(&service, []);
        assert_eq!(decoded.value.unwrap().service.ports.len(), 20_000);
        assert_eq!(decoded.rejected.len(), rejected, "{count} ports");
    }
}

#[test]
fn an_invalid_port_shifts_no_endpoint_to_another_port() {
    let good = |port| localv1::PortMapping { protocol: 1, port, ..Default::default() };
    let mut service = plain_service();
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
        let family = |it: &str| localv1::IpSet::of([it]);
        let ips = localv1::ServiceIPs {
            cluster_ips: Some(family(cluster_ip)),
            external_ips: Some(family(address)),
            load_balancer_ips: Some(family(address)),
            ..Default::default()
        };
        let port = localv1::PortMapping { name: name.into(), ..Default::default() };
        let message = localv1::Service { ips: Some(ips), ..kpng_service(port) };
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
        ..plain_service()
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
