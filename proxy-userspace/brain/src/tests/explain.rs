//! How a decision is put into words. That the words agree with the decisions is tested with the scenarios and with random
//! clusters, in `tests/`.

use std::num::NonZeroU32;

use model::{
    cluster::ClusterState,
    state::{ServiceCidr, SocketLb, TrafficPolicy},
};

use super::*;
use crate::{Explanation, Query, explain};

/// The Service, its slice, n1 in zone a and n2 in zone b; each node has the address 192.0.2.N.
fn cluster(service: Service, endpoints: impl Into<Vec<Endpoint>>) -> ClusterState {
    let mut cluster = ClusterState::default();
    cluster.set_service(service);
    cluster.set_slice(slice(endpoints));
    for (name, zone, address) in [("n1", "a", "192.0.2.1"), ("n2", "b", "192.0.2.2")] {
        let info = state::NodeInfo { addresses: vec![address.parse().unwrap()], ..Default::default() };
        cluster.set_node(Node { info, ..node(name, Some(zone)) });
    }
    cluster
}

fn ask(cluster: &ClusterState, words: &str) -> Result<Explanation, String> {
    let query = Query::parse(&words.split(' ').collect::<Vec<_>>());
    let explained = query.and_then(|it| explain(cluster, &Options::default(), "n1", &it));
    explained.map_err(|it| it.to_string())
}

/// Checks the verdict, then of each endpoint the last part of its address, whether it is used, and why.
#[track_caller]
fn check(cluster: &ClusterState, words: &str, expect: &[&str]) {
    let found = match ask(cluster, words) {
        Ok(it) => {
            let verdict = format!("{:?}: {}", it.verdict, it.reason);
            let endpoint = |it: &crate::ExplainedEndpoint| {
                let address = it.endpoint.ip().to_string();
                let last = address.rsplit('.').next().unwrap().to_owned();
                format!("{last} {}: {}", if it.used { "used" } else { "not used" }, it.reason)
            };
            [verdict].into_iter().chain(it.endpoints.iter().map(endpoint)).collect()
        }
        Err(error) => vec![error],
    };
    assert_eq!(found, expect, "{words}");
}

/// Checks what a rule says; nothing if it was not applied.
#[track_caller]
fn check_rule(cluster: &ClusterState, words: &str, rule: &str, expect: Option<&str>) {
    let explanation = ask(cluster, words).unwrap();
    let found = explanation.rules.iter().find(|it| it.rule == rule).map(|it| it.says.as_str());
    assert_eq!(found, expect, "{words}: {explanation:#?}");
}

#[test]
fn each_endpoint_has_a_reason() {
    let gone = Endpoint {
        conditions: Conditions { ready: false, serving: false, terminating: true },
        ..at("10.1.0.4")
    };
    let endpoints = [here("10.1.0.1"), unready(at("10.1.0.2")), terminating(at("10.1.0.3")), gone];
    check(
        &cluster(service(), endpoints),
        "node web.ns",
        &[
            "Redirected: to 10.1.0.1:8080, the only endpoint",
            "1 used: ready",
            "2 not used: not ready",
            "3 not used: terminating, others are ready",
            "4 not used: terminating, does not serve",
        ],
    );
    check(
        &cluster(
            service(),
            [terminating(at("10.1.0.1")), terminating(here("10.1.0.2")), unready(at("10.1.0.3"))],
        ),
        "node web.ns",
        &[
            "Redirected: to one of 2 endpoints",
            "1 used: terminating, still serves: none is ready",
            "2 used: terminating, still serves: none is ready",
            "3 not used: not ready",
        ],
    );
}

#[test]
fn the_policy_local_is_explained() {
    let local = Service { internal_policy: TrafficPolicy::Local, ..service() };
    // Whatever the hints say.
    for hinted in [
        [zones(here("10.1.0.1"), &["a"]), zones(at("10.1.0.2"), &["b"])],
        [nodes(here("10.1.0.1"), &["n1"]), nodes(at("10.1.0.2"), &["n2"])],
    ] {
        let verdict = "Redirected: to 10.1.0.1:8080, the only endpoint";
        let reasons = ["1 used: ready, on this node", "2 not used: not on this node"];
        check(&cluster(local.clone(), hinted), "node web.ns", &[&[verdict], &reasons[..]].concat());
    }
    let with = |endpoints: &[Endpoint]| cluster(local.clone(), endpoints);
    let both = with(&[at("10.1.0.1"), here("10.1.0.2")]);
    let expect = ["Redirected: to 10.1.0.2:8080, the only endpoint", "2 used: ready, on this node"];
    check(&both, "node web.ns", &[&expect[..], &["1 not used: not on this node"]].concat());
    check_rule(
        &both,
        "node web.ns",
        "policy",
        Some("internalTrafficPolicy Local: endpoints on this node only"),
    );
    check(
        &with(&[at("10.1.0.1"), terminating(here("10.1.0.2"))]),
        "node web.ns",
        &[
            "Redirected: to 10.1.0.2:8080, the only endpoint",
            "2 used: terminating, still serves: none on this node is ready",
            "1 not used: not on this node",
        ],
    );
    let elsewhere = with(&[at("10.1.0.1"), terminating(at("10.1.0.2"))]);
    for (client, verdict) in [("node", "Refused"), ("pod 10.1.0.9", "Refused"), ("outside", "Dropped")] {
        let reason = "internalTrafficPolicy is Local, and no endpoint on this node serves";
        let verdict = format!("{verdict}: {reason}");
        let endpoints = ["1 not used: not on this node", "2 not used: not on this node"];
        check(&elsewhere, &format!("{client} web.ns"), &[&[&*verdict], &endpoints[..]].concat());
    }
}

#[test]
fn hints_are_explained_whether_they_are_used_or_not() {
    let with = |endpoints: &[Endpoint]| cluster(service(), endpoints);
    let by_zone = [zones(at("10.1.0.1"), &["a", "c"]), zones(at("10.1.0.2"), &["b"])];
    let reasons = ["1 used: ready, hint for zone a", "2 not used: hint for zone b, this is zone a"];
    let verdict = "Redirected: to 10.1.0.1:8080, the only endpoint";
    check(&with(&by_zone), "node web.ns", &[&[verdict], &reasons[..]].concat());
    let by_node = [nodes(at("10.1.0.1"), &["n1"]), nodes(at("10.1.0.2"), &["n2", "n3"])];
    let reasons = ["1 used: ready, hint for this node", "2 not used: hint for node n2, n3"];
    check(&with(&by_node), "node web.ns", &[&[verdict], &reasons[..]].concat());
    let hints = |endpoints: &[Endpoint], expect| check_rule(&with(endpoints), "node web.ns", "hints", expect);
    hints(&by_zone, Some("endpoints whose hint names zone a"));
    hints(&by_node, Some("endpoints whose hint names this node"));
    hints(&[at("10.1.0.1")], None);
    hints(&[by_zone[0].clone(), at("10.1.0.3")], Some("ignored: 1 of 2 ready endpoints have none"));
    hints(&by_zone[1..], Some("ignored: none is for zone a"));
    hints(&by_node[1..], Some("ignored: none is for this node"));
    let mut without_zone = with(&by_zone);
    without_zone.set_node(node("n1", None));
    let expect = "ignored: the Node object has no label topology.kubernetes.io/zone";
    check_rule(&without_zone, "node web.ns", "hints", Some(expect));
    let mut without_zone = with(&by_node[1..]);
    without_zone.set_node(node("n1", None));
    check_rule(&without_zone, "node web.ns", "hints", Some("ignored: none is for this node"));
}

#[test]
fn a_port_without_endpoints_says_what_is_missing() {
    let with = |endpoints: &[Endpoint]| cluster(service(), endpoints);
    check(&with(&[]), "node web.ns", &["Refused: ns/web has no endpoints"]);
    check(
        &with(&[unready(at("10.1.0.1"))]),
        "node web.ns",
        &["Refused: no endpoint is ready", "1 not used: not ready"],
    );
    let expect = ["Refused: ns/web has endpoints, but none with an IPv6 address"];
    check(&with(&[at("10.1.0.1")]), "node [fd00::1]:80", &expect);
    let named = Service { ports: vec![service_port("http", Protocol::Tcp, 80)], ..service() };
    let expect = ["Refused: no EndpointSlice of ns/web has the port \"http\"/TCP"];
    check(&cluster(named, [at("10.1.0.1")]), "node web.ns:http", &expect);
}

#[test]
fn frontends_beyond_the_cluster_ip_are_explained() {
    let exposed = Service {
        external_policy: TrafficPolicy::Local,
        load_balancer_ips: vec!["203.0.113.7".parse().unwrap()],
        source_ranges: vec!["198.51.100.0/24".parse().unwrap()],
        ..with_node_port()
    };
    let cluster = cluster(exposed, [here("10.1.0.1"), at("10.1.0.2")]);
    let rule = |words: &str, rule: &str, expect: &str| check_rule(&cluster, words, rule, Some(expect));
    rule("node web.ns", "frontend", "cluster IP");
    rule("outside web.ns", "frontend", "load balancer IP");
    let ranges = "loadBalancerSourceRanges 198.51.100.0/24";
    rule("outside web.ns", "sources", &format!("{ranges}: the client's address decides"));
    rule("outside 198.51.100.9 web.ns", "sources", &format!("{ranges}: 198.51.100.9 is in it"));
    let denied = ask(&cluster, "outside 198.51.1.9 web.ns").unwrap();
    assert_eq!(denied.reason, format!("{ranges}: 198.51.1.9 is not in it"));
    rule("node 192.0.2.1:30080", "frontend", "node port: 192.0.2.1 is an address of this node");
    rule("node 127.0.0.1:30080", "frontend", "node port, on loopback");
    let unknown = "node port, if 192.0.2.9 is an address of this node: no Node object has it";
    rule("outside 192.0.2.9:30080", "frontend", unknown);
    rule("outside 192.0.2.1:30080", "policy", "externalTrafficPolicy Local: endpoints on this node only");
    let inside = "endpoints on every node: externalTrafficPolicy Local is for clients outside the cluster";
    rule("node 192.0.2.1:30080", "policy", inside);
    for (words, expect) in [
        ("pod 10.1.0.9 127.0.0.1:30080", "127.0.0.1 is the loopback address of the client itself"),
        ("outside 192.0.2.2:30080", "192.0.2.2 is an address of node n2, which decides: ask there"),
        (
            "node 192.0.2.2:30080",
            "192.0.2.2 is an address of node n2, which decides, because externalTrafficPolicy is Local",
        ),
        ("node 192.0.2.1:30081", "no Service has the node port 30081/TCP"),
    ] {
        check(&cluster, words, &[&format!("Untranslated: {expect}")]);
    }
}

#[test]
fn the_node_port_of_another_node_is_redirected_here_unless_the_policy_is_local() {
    let cluster = cluster(with_node_port(), [at("10.1.0.2")]);
    let found = ask(&cluster, "node 192.0.2.2:30080").unwrap();
    assert_eq!(found.reason, "to 10.1.0.2:8080, the only endpoint");
    check_rule(
        &cluster,
        "node 192.0.2.2:30080",
        "frontend",
        Some("node port: 192.0.2.2 is an address of node n2"),
    );
    // A Service's own address is no node's.
    let refused = "Refused: 10.96.0.1 is a cluster IP of ns/web, which has no such port: it has 80/TCP";
    check(&cluster, "node 10.96.0.1:30080", &[refused]);
}

#[test]
fn a_port_on_two_protocols_is_meant_by_its_number_or_with_a_protocol() {
    let mut dns = service();
    dns.ports = vec![
        service_port("dns", Protocol::Udp, 53),
        service_port("dns-tcp", Protocol::Tcp, 53),
        service_port("metrics", Protocol::Tcp, 9153),
    ];
    let cluster = cluster(dns, []);
    let address = |words: &str| ask(&cluster, words).map(|it| format!("{}/{}", it.destination, it.protocol));
    assert_eq!(address("node web.ns:53").unwrap(), "10.96.0.1:53/UDP");
    assert_eq!(address("node web.ns:53/tcp").unwrap(), "10.96.0.1:53/TCP");
    assert_eq!(address("node web.ns:dns-tcp").unwrap(), "10.96.0.1:53/TCP");
    assert_eq!(address("node web.ns:metrics").unwrap(), "10.96.0.1:9153/TCP");
    let several = address("node web.ns").unwrap_err();
    assert!(several.starts_with("Service ns/web has several ports; name one: "), "{several}");
    let none = address("node web.ns:9153/udp").unwrap_err();
    assert!(none.starts_with("Service ns/web has no such port: "), "{none}");
}

#[test]
fn what_no_service_has_is_explained() {
    let mut cluster = cluster(service(), [pod(here("10.1.0.1"), "web-1"), pod(at("10.1.0.2"), "web-2")]);
    cluster.set_service_cidr(ServiceCidr {
        name: "kubernetes".into(),
        cidrs: vec!["10.96.0.0/16".parse().unwrap()],
    });
    let named = |name: &str| Service { name: ServiceName::new("ns", name), ..service() };
    let mesh = Service {
        proxy_name: Some("mesh".into()),
        cluster_ips: vec!["10.97.0.1".parse().unwrap()],
        ..named("mesh")
    };
    cluster.set_service(mesh);
    cluster.set_service(Service { cluster_ips: Vec::new(), ..named("headless") });
    cluster.set_service(Service { kind: None, ..named("alias") });
    for (words, expect) in [
        (
            "node 10.96.0.1:81",
            "Refused: 10.96.0.1 is a cluster IP of ns/web, which has no such port: it has 80/TCP",
        ),
        ("node 10.96.0.2:80", "Dropped: 10.96.0.2 is in the ServiceCIDR kubernetes, and no Service has it"),
        ("node 10.1.0.1:80", "Untranslated: 10.1.0.1 is an endpoint of ns/web, and no frontend"),
        (
            "node 11.96.0.1:80",
            "Untranslated: no Service has the address 11.96.0.1; nearest: 10.96.0.1:80/TCP (ns/web)",
        ),
        (
            "node 10.97.0.1:80",
            "Untranslated: Service ns/mesh is served by the proxy \"mesh\" (label service.kubernetes.io/service-proxy-name), \
             and this is \"\"",
        ),
        (
            "node headless.ns:80",
            "Service ns/headless has no cluster IP: its clients connect to its endpoints, which DNS names",
        ),
        ("node alias.ns:80", "Service ns/alias is of type ExternalName: a DNS entry, which is not proxied"),
        ("node wbe.ns", "there is no Service ns/wbe; nearest: ns/web, ns/mesh"),
        ("node web.ns:81", "Service ns/web has no such port: it has 80/TCP"),
        (
            "pod ns/web-2 web.ns",
            "pod ns/web-2 runs on node n2, and this is n1: ask on that node, or with --source and --node-name n2",
        ),
        (
            "pod ns/api-1 web.ns",
            "no endpoint is of a pod ns/api-1; of a pod that is an endpoint of no Service give the address, too, as in \
             ns/api-1=10.244.1.7, as `kubectl service-proxy explain` does; nearest: ns/web-1",
        ),
        (
            "pod ns/web-2=10.1.0.2 web.ns",
            "pod ns/web-2 runs on node n2, and this is n1: ask on that node, or with --source and --node-name n2",
        ),
    ] {
        check(&cluster, words, &[expect]);
    }
    assert_eq!(ask(&cluster, "pod ns/web-1 web.ns").unwrap().client.addresses, [ip("10.1.0.1")]);
    let client = ask(&cluster, "pod ns/client=10.1.0.7 web.ns").unwrap().client;
    assert_eq!((client.pod.as_deref(), client.addresses), (Some("ns/client"), vec![ip("10.1.0.7")]));
    assert_eq!(ask(&cluster, "pod 10.1.0.1 web.ns").unwrap().client.pod.as_deref(), Some("ns/web-1"));
}

fn ip(text: &str) -> std::net::IpAddr {
    text.parse().unwrap()
}

#[test]
fn a_frontend_that_two_services_claim_is_explained_with_its_owner() {
    let mut cluster = cluster(service(), [at("10.1.0.1")]);
    cluster.set_service(Service {
        name: ServiceName::new("ns", "thief"),
        cluster_ips: vec!["10.96.0.9".parse().unwrap()],
        external_ips: vec!["10.96.0.1".parse().unwrap()],
        ..service()
    });
    let expect = "ns/thief claims it, too; it belongs to ns/web (by cluster IP, then age, then name)";
    check_rule(&cluster, "node 10.96.0.1:80", "conflict", Some(expect));
    check_rule(&cluster, "node 10.96.0.9:80", "conflict", None);
    let cluster_ips = vec!["10.96.0.9".parse().unwrap()];
    cluster.set_service(with_node_port());
    cluster.set_service(Service { name: ServiceName::new("ns", "xerox"), cluster_ips, ..with_node_port() });
    let expect = "ns/xerox claims it, too; it belongs to ns/web (by cluster IP, then age, then name)";
    check_rule(&cluster, "node 192.0.2.1:30080", "conflict", Some(expect));
}

#[test]
fn the_service_and_its_policies_are_named() {
    let mut named = with_node_port();
    named.external_ips = vec!["192.0.2.9".parse().unwrap()];
    named.ports[0].name = "http".into();
    let cluster_of = |policy| {
        let mut service = named.clone();
        service.external_policy = policy;
        service.ports[0].target_port = TargetPort::Name("web".into());
        cluster(service, [here("10.1.0.1")])
    };
    let [everywhere, here] = [TrafficPolicy::Cluster, TrafficPolicy::Local].map(cluster_of);
    check_rule(&everywhere, "node web.ns", "service", Some("ns/web, port http 80/TCP to targetPort web"));
    check_rule(
        &cluster(service(), []),
        "node web.ns",
        "service",
        Some("ns/web, port 80/TCP to targetPort 80"),
    );
    for (cluster, words, expect) in [
        (&everywhere, "node web.ns", "internalTrafficPolicy Cluster: endpoints on every node"),
        (&everywhere, "node 192.0.2.9:80", "externalTrafficPolicy Cluster: endpoints on every node"),
        (&everywhere, "outside 192.0.2.9:80", "externalTrafficPolicy Cluster: endpoints on every node"),
        (&here, "node web.ns", "internalTrafficPolicy Cluster: endpoints on every node"),
        (&here, "outside 192.0.2.9:80", "externalTrafficPolicy Local: endpoints on this node only"),
    ] {
        check_rule(cluster, words, "policy", Some(expect));
    }
}

#[test]
fn source_ranges_concern_the_family_of_the_address() {
    let with = |ranges: &[&str]| {
        let service = Service {
            load_balancer_ips: vec!["203.0.113.7".parse().unwrap(), "2001:db8::7".parse().unwrap()],
            source_ranges: ranges.iter().map(|it| it.parse().unwrap()).collect(),
            kind: Some(state::ServiceKind::LoadBalancer),
            ..service()
        };
        cluster(service, [at("10.1.0.1")])
    };
    let words = "outside 198.51.100.9 203.0.113.7:80";
    let one = with(&["198.51.100.0/24", "2001:db8:1::/48"]);
    check_rule(
        &one,
        words,
        "sources",
        Some("loadBalancerSourceRanges 198.51.100.0/24: 198.51.100.9 is in it"),
    );
    check_rule(&one, "outside 203.0.113.7:80", "frontend", Some("load balancer IP"));
    check_rule(&with(&["2001:db8:1::/48"]), words, "sources", None);
    check_rule(&with(&["10.0.0.0/8", "0.0.0.0/0"]), words, "sources", None);
    check_rule(
        &one,
        "outside 198.51.100.9 [2001:db8::7]:80",
        "sources",
        Some("loadBalancerSourceRanges 2001:db8:1::/48: the client's address decides"),
    );
}

#[test]
fn the_selection_of_an_endpoint_is_explained() {
    let check = |service: Service, expect| {
        check_rule(&cluster(service, [at("10.1.0.1")]), "node web.ns", "selection", Some(expect));
    };
    check(service(), "at random");
    let affinity = Some(state::ClientIpAffinity { timeout_seconds: NonZeroU32::MIN });
    check(
        Service { affinity, ..service() },
        "at random; a client keeps it for 1 s (sessionAffinity ClientIP)",
    );
    let load_balancing = state::LoadBalancing {
        algorithm: state::Algorithm::LeastConnections,
        slow_start: NonZeroU16::new(30),
        ..state::LoadBalancing::default()
    };
    let expect = "of two random endpoints the one with fewer connections of this node (packets: at random); \
                  a new endpoint has its full share after 30 s";
    check(Service { load_balancing, ..service() }, expect);
    // Of a Service over TCP nothing is said of UDP.
    let load_balancing = state::LoadBalancing { udp_to_packets: true, ..state::LoadBalancing::default() };
    check(Service { load_balancing, ..service() }, "at random");
    let mut dns = Service { load_balancing, ..service() };
    dns.ports[0].protocol = Protocol::Udp;
    let mut slice = slice([at("10.1.0.1")]);
    slice.ports[0].protocol = Protocol::Udp;
    let mut cluster = cluster(dns, []);
    cluster.set_slice(slice);
    let expect = "at random; by the packet path, also for sockets, if there is one (annotation kube-proxy-ebpf.io/udp)";
    check_rule(&cluster, "node web.ns", "selection", Some(expect));
}

#[test]
fn what_a_pod_leaves_to_packets_is_explained() {
    let mut cluster = cluster(service(), [at("10.1.0.1")]);
    for (name, socket_lb) in [("ns/vpn", SocketLb::Off), ("ns/media", SocketLb::TcpOnly)] {
        cluster.set_pod(state::Pod { name: name.into(), uid: "u".into(), socket_lb });
    }
    let says = |what| {
        format!(
            "{what} are left to packets, by the annotation kube-proxy-ebpf.io/socket-lb of the pod (--pod-annotations)"
        )
    };
    check_rule(&cluster, "pod ns/vpn web.ns", "sockets", Some(&says("all")));
    check_rule(&cluster, "pod ns/media web.ns", "sockets", Some(&says("those of UDP")));
    check_rule(&cluster, "node web.ns", "sockets", None);
}
