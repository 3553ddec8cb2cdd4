//! What is counted is what happened, by service port and by endpoint, whatever becomes of the proxy meanwhile.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    process::Command,
    time::Duration,
};

use tests::{
    Build, ConnectLoad, EchoServer, TestNode, Transport, eventually,
    http::get,
    load::LoadReport,
    manifest::{self, Service},
    request,
    requirements::kernel_at_least,
    scaled,
    test_node::NODE,
};

const LIMIT: Duration = Duration::from_secs(20);
const WEB: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
const EXTERNAL: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 80);
const OWN: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

fn endpoint(n: u8) -> IpAddr {
    [10, 244, 1, n].into()
}

/// Two ports, at a cluster IP, an external IP and a node port, with these endpoints.
fn web(endpoints: &[u8]) -> Service {
    let web = Service::new("web", &[WEB.into()])
        .external_ips(&[EXTERNAL.into()])
        .port("http", "TCP", 80, 8080)
        .node_port(30_080)
        .port("dns", "UDP", 53, 8080);
    endpoints.iter().fold(web, |it, n| it.endpoint(&format!("web-{n}"), &[endpoint(*n)]))
}

fn server(n: u8) -> EchoServer {
    EchoServer::start(&format!("web-{n}"), SocketAddr::new(endpoint(n), 8080)).unwrap()
}

/// What a service port has counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Counted {
    connections: u64,
    no_backend: u64,
    denied: u64,
    endpoints: BTreeMap<String, u64>,
}

/// What `status` says of each port of the Services, by its name.
fn counted(world: &TestNode, build: Build) -> BTreeMap<String, Counted> {
    let mut command = Command::new(build.binary());
    command.args(["status", "--output", "json", "--cgroup"]).arg(world.sandbox().cgroup());
    let output = command.arg("--pin-dir").arg(world.sandbox().pins()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |it: &serde_json::Value| it.as_u64().unwrap();
    let counted = status["counters"].as_array().unwrap().iter().map(|it| {
        let endpoints = it["endpoints"].as_array().unwrap().iter();
        let endpoints =
            endpoints.map(|it| (it["endpoint"].as_str().unwrap().to_owned(), number(&it["connections"])));
        let counted = Counted {
            connections: number(&it["connections"]),
            no_backend: number(&it["noBackend"]),
            denied: number(&it["denied"]),
            endpoints: endpoints.collect(),
        };
        (it["port"].as_str().unwrap().to_owned(), counted)
    });
    counted.collect()
}

#[test]
fn connections_no_backend_and_denied_are_counted_by_service_port_and_endpoint() {
    let name = "connections_no_backend_and_denied_are_counted_by_service_port_and_endpoint";
    let Some(world) = TestNode::or_skip(name) else { return };
    world.netns().add_address(OWN.into()).unwrap();
    manifest::write_atomically(
        &world.manifests().join("node.yaml"),
        &manifest::node_with_addresses(NODE, &[OWN.into()]),
    )
    .unwrap();
    let _servers = [1, 2].map(server);
    world.write(&[web(&[1, 2])]);
    let mut agent = world.command(Build::Product).start(world.sandbox()).unwrap();
    let is_ready = || get((Ipv4Addr::LOCALHOST, 10256).into(), "/readyz").is_ok_and(|it| it.status == 200);
    agent.wait_until(LIMIT, is_ready).unwrap();
    let all = counted(&world, Build::Product);
    assert_eq!(all["http"].connections + all["dns"].connections, 0, "{all:?}");

    // Every address of a service port counts for it, and every endpoint for itself.
    let mut answers: BTreeMap<String, u64> = BTreeMap::new();
    for n in 0..30 {
        let address = [(WEB, 80), (EXTERNAL, 80), (OWN, 30_080)][n % 3];
        let who = request(Transport::Tcp, address.into()).unwrap();
        let address = SocketAddr::new(endpoint(who["web-".len()..].parse().unwrap()), 8080);
        *answers.entry(address.to_string()).or_default() += 1;
    }
    let all = counted(&world, Build::Product);
    let expect = Counted { connections: 30, endpoints: answers, ..Counted::default() };
    assert_eq!(all["http"], expect);

    // A conversation over UDP counts once, however many datagrams it has.
    let dns = SocketAddr::from((WEB, 53));
    request(Transport::Udp, dns).unwrap();
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    for _ in 0..5 {
        socket.send_to(b"who?", dns).unwrap();
        socket.recv_from(&mut [0; 64]).unwrap();
    }
    assert_eq!(counted(&world, Build::Product)["dns"].connections, 2);

    // Whoever binds the node port is refused, and counted apart. (Before, a kernel does not tell that this is the node.)
    let denied = u64::from(kernel_at_least(5, 14));
    let bound = TcpListener::bind((OWN, 30_080));
    assert_eq!(bound.is_err(), denied == 1, "{bound:?}");
    drop(bound);
    world.write(&[web(&[])]);
    let refused = |address: SocketAddr| TcpStream::connect(address).is_err();
    agent.wait_until(LIMIT, || counted(&world, Build::Product)["http"].endpoints.is_empty()).unwrap();
    for address in [(WEB, 80), (EXTERNAL, 80), (OWN, 30_080)] {
        assert!(refused(address.into()));
    }
    assert!(socket.send_to(b"who?", dns).is_err());
    let all = counted(&world, Build::Product);
    assert_eq!(all["http"], Counted { connections: 30, no_backend: 3, denied, ..Counted::default() });
    assert_eq!(all["dns"], Counted { connections: 2, no_backend: 1, ..Counted::default() });

    // The pages say the same.
    let page = |path: &str| get((Ipv4Addr::LOCALHOST, 10249).into(), path).unwrap().body;
    let series =
        r#"kube_proxy_ebpf_no_backend_total{namespace="default",service="web",port="http",protocol="TCP"} 3"#;
    assert!(page("/metrics").contains(series));
    let status = page("/status");
    let sums = format!(r#""counted":{{"connections":32,"noBackend":4,"denied":{denied}}}"#);
    assert!(status.contains(&sums), "{status}");
}

#[test]
fn counters_outlast_updates_deaths_and_upgrades_and_lose_nothing() {
    let name = "counters_outlast_updates_deaths_and_upgrades_and_lose_nothing";
    let Some(world) = TestNode::or_skip(name) else { return };
    let _servers: Vec<_> = (1..=4).map(server).collect();
    world.write(&[web(&[1, 2])]);
    let start = |build: Build| {
        let mut agent = world.command(build).start(world.sandbox()).unwrap();
        let is_ready =
            || get((Ipv4Addr::LOCALHOST, 10256).into(), "/readyz").is_ok_and(|it| it.status == 200);
        agent.wait_until(LIMIT, is_ready).unwrap();
        agent
    };
    let mut agent = start(Build::Failpoints);
    let load = ConnectLoad::start(Transport::Tcp, (WEB, 80).into(), 2, scaled(Duration::from_millis(1)));
    let web_by = |build| counted(&world, build).remove("http").unwrap_or_default();
    let mut before = 0;
    for (build, endpoints) in [
        (Build::Failpoints, &[2, 3][..]),
        (Build::Failpoints, &[3, 4, 1]),
        (Build::NextLayout, &[1, 2]),
        (Build::Failpoints, &[2, 4]),
    ] {
        // The endpoints change under it, and after it.
        world.write(&[web(endpoints)]);
        agent.kill9().unwrap();
        agent = start(build);
        world.write(&[web(&endpoints[..1])]);
        let counts_on = || {
            let web = web_by(build);
            web.endpoints.len() == 1 && web.connections > before
        };
        assert!(eventually(LIMIT, counts_on), "{build:?}: {:?}, {before} before", web_by(build));
        before = web_by(build).connections;
    }
    let report = LoadReport::of(&load.stop());
    assert_eq!(report.failed, 0, "{:?}", report.errors);
    assert_eq!(web_by(Build::Failpoints).connections, report.connects as u64, "each is counted once");

    // What is gone is released: a Service of the same name begins anew, even if the proxy died in between.
    world.write(&[Service::new("other", &[[10, 96, 0, 11].into()]).port("other", "TCP", 80, 8080)]);
    let is_gone = || !counted(&world, Build::Failpoints).contains_key("http");
    assert!(eventually(LIMIT, is_gone));
    agent.kill9().unwrap();
    let agent = start(Build::Failpoints);
    world.write(&[web(&[1])]);
    assert!(eventually(LIMIT, || !is_gone()));
    assert_eq!(
        counted(&world, Build::Failpoints)["http"],
        Counted { endpoints: [("10.244.1.1:8080".into(), 0)].into(), ..Counted::default() }
    );
    drop(agent);
}
