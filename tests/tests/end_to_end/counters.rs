//! Counters are exact, by service port and by endpoint, across updates, crashes and upgrades.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use tests::{
    Build, ConnectLoad, NODE, Service, TIMEOUT, TestNode, Transport, WEB, WEB4, assert_contains, endpoint,
    eventually, exchange, http, kernel_at_least, manifest, request, run, scaled, udp_socket,
};

const EXTERNAL: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 80);
/// An address of the node.
const OWN: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// Every frontend of the port `http`.
const HTTP: [(Ipv4Addr, u16); 3] = [(WEB4, 80), (EXTERNAL, 80), (OWN, 30_080)];

/// Two ports, at a cluster IP, an external IP and a node port, with these endpoints.
fn web(endpoints: &[u8]) -> Service {
    Service::new("web", &WEB[..1])
        .external_ips(&[EXTERNAL.into()])
        .port("http", "TCP", 80, 8080)
        .node_port(30_080)
        .port("dns", "UDP", 53, 8080)
        .endpoints(endpoints.iter().copied())
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Counters {
    connections: u64,
    no_backend: u64,
    denied: u64,
    endpoints: BTreeMap<String, u64>,
}

/// The counters that `status` reports, by the name of the port.
fn counters(node: &TestNode, build: Build) -> BTreeMap<String, Counters> {
    let output = run(node.cli_of(build, "status").args(["--output", "json"])).success();
    let status: serde_json::Value = serde_json::from_str(&output).unwrap();
    let number = |it: &serde_json::Value| it.as_u64().unwrap();
    let counters = status["counters"].as_array().unwrap().iter().map(|it| {
        let endpoints = it["endpoints"].as_array().unwrap().iter();
        let endpoints =
            endpoints.map(|it| (it["endpoint"].as_str().unwrap().to_owned(), number(&it["connections"])));
        let counters = Counters {
            connections: number(&it["connections"]),
            no_backend: number(&it["noBackend"]),
            denied: number(&it["denied"]),
            endpoints: endpoints.collect(),
        };
        (it["port"].as_str().unwrap().to_owned(), counters)
    });
    counters.collect()
}

#[test]
fn connections_no_backend_and_denied_are_counted_by_service_port_and_endpoint() {
    let Some(mut node) = TestNode::or_skip() else { return };
    node.netns().add_address(OWN.into()).unwrap();
    node.write_file("node.yaml", &manifest::node_with_addresses(NODE, &[OWN.into()]));
    node.serve([1, 2]);
    node.write(&[web(&[1, 2])]);
    node.start(&[]);
    node.wait_until_ready();
    let counted = || counters(&node, Build::Product);
    let all = counted();
    assert_eq!(all["http"].connections + all["dns"].connections, 0, "{all:?}");

    // Every frontend of a service port counts for it, and every endpoint separately.
    let mut replies: BTreeMap<String, u64> = BTreeMap::new();
    for n in 0..30 {
        let name = request(Transport::Tcp, HTTP[n % 3].into()).unwrap();
        let endpoint = SocketAddr::new(endpoint(name["web-".len()..].parse().unwrap())[0], 8080);
        *replies.entry(endpoint.to_string()).or_default() += 1;
    }
    assert_eq!(counted()["http"], Counters { connections: 30, endpoints: replies, ..Counters::default() });

    // A UDP flow counts once, however many datagrams it has.
    let dns = SocketAddr::from((WEB4, 53));
    request(Transport::Udp, dns).unwrap();
    let socket = udp_socket(dns).unwrap();
    for _ in 0..5 {
        exchange(&socket, dns).unwrap();
    }
    assert_eq!(counted()["dns"].connections, 2);

    // A bind to the node port is denied and counted separately. (An older kernel does not identify the node's namespace.)
    let denied = u64::from(kernel_at_least(5, 14));
    let bound = TcpListener::bind((OWN, 30_080));
    assert_eq!(bound.is_err(), denied == 1, "{bound:?}");
    drop(bound);
    node.write(&[web(&[])]);
    assert!(eventually(TIMEOUT, || counted()["http"].endpoints.is_empty()));
    assert!(HTTP.iter().all(|it| TcpStream::connect(it).is_err()));
    assert!(socket.send_to(b"who?", dns).is_err());
    let all = counted();
    assert_eq!(all["http"], Counters { connections: 30, no_backend: 3, denied, ..Counters::default() });
    assert_eq!(all["dns"], Counters { connections: 2, no_backend: 1, ..Counters::default() });

    // The pages report the same.
    let series =
        r#"kube_proxy_ebpf_no_backend_total{namespace="default",service="web",port="http",protocol="TCP"} 3"#;
    assert_contains(&http::metrics("/metrics").unwrap().body, &[series]);
    let sums =
        format!(r#""counters":{{"connections":32,"noBackend":4,"denied":{denied},"leftToPackets":0}}"#);
    assert_contains(&node.status_page("/status").unwrap().body, &[&sums]);
}

/// How long counters of a deleted Service are kept at most, as connections may report failures to them: two checks.
const TIME_TO_RELEASE: Duration = Duration::from_secs(11);

#[test]
fn counters_survive_updates_crashes_and_upgrades() {
    let Some(mut node) = TestNode::prepared_or_skip(1..=4, &[web(&[1, 2])]) else { return };
    let start = |node: &mut TestNode, build| {
        node.start_with(&node.command(build));
        node.wait_until_ready();
    };
    start(&mut node, Build::Failpoints);
    let load = ConnectLoad::start(Transport::Tcp, (WEB4, 80).into(), 2, scaled(Duration::from_millis(1)));
    let http = |node: &TestNode, build| counters(node, build).remove("http").unwrap_or_default();
    let mut before = 0;
    for (build, endpoints) in [
        (Build::Failpoints, &[2, 3][..]),
        (Build::Failpoints, &[3, 4, 1]),
        (Build::NextLayout, &[1, 2]),
        (Build::Failpoints, &[2, 4]),
    ] {
        // The endpoints change before the crash and after it.
        node.write(&[web(endpoints)]);
        node.kill();
        start(&mut node, build);
        node.write(&[web(&endpoints[..1])]);
        node.wait_until(|node| {
            let http = http(node, build);
            http.endpoints.len() == 1 && http.connections > before
        });
        before = http(&node, build).connections;
    }
    let report = load.stop_without_failure(0);
    assert_eq!(http(&node, Build::Failpoints).connections, report.connects as u64, "each is counted once");

    // The counters of a deleted Service are released: one of the same name starts at zero, also after a crash.
    node.write(&[Service::new("other", &[[10, 96, 0, 11].into()]).port("other", "TCP", 80, 8080)]);
    let has_http = |node: &TestNode| counters(node, Build::Failpoints).contains_key("http");
    node.wait_until(|node| !has_http(node));
    thread::sleep(scaled(TIME_TO_RELEASE));
    node.kill();
    start(&mut node, Build::Failpoints);
    node.write(&[web(&[1])]);
    node.wait_until(has_http);
    assert_eq!(
        http(&node, Build::Failpoints),
        Counters { endpoints: [("10.244.1.1:8080".into(), 0)].into(), ..Counters::default() }
    );
}
