//! Traffic that has no socket on the node: from outside, from pods, and from the node itself, through nftables.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod affinity;
mod long_lived;
mod node;
mod policies;
mod sources;

use std::{
    collections::BTreeSet,
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    process::Command,
    time::Duration,
};

use tests::{
    Agent, Build, NetNs, TestCluster, Transport,
    agent::AgentCommand,
    manifest::Service,
    test_cluster::{N1, P1, P3, Reply, TARGET},
};

const LIMIT: Duration = Duration::from_secs(20);
const BACKENDS: [&str; 2] = ["nft", "ebpf"];
const NODE_PORT: u16 = 30_080;

/// A cluster IP of each family.
fn ips(n: u8) -> [IpAddr; 2] {
    [Ipv4Addr::new(10, 96, 0, n).into(), Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, n.into()).into()]
}

/// An address that a load balancer, or an administrator, leads to n1.
fn outer(n: u8) -> [IpAddr; 2] {
    [Ipv4Addr::new(203, 0, 113, n).into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, n.into()).into()]
}

/// A Service over TCP and UDP without endpoints: port 80 at its addresses, and node ports from [`NODE_PORT`] on.
fn service(name: &str, n: u8) -> Service {
    let node_port = NODE_PORT + u16::from(n);
    Service::new(name, &ips(n))
        .port("tcp", "TCP", 80, TARGET)
        .node_port(node_port)
        .port("udp", "UDP", 80, TARGET)
        .node_port(node_port)
}

fn at(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip, port)
}

/// Where a Service of [`service`] with addresses outside can be reached from outside.
fn doors(n: u8) -> Vec<SocketAddr> {
    let node_ports = N1.map(|ip| at(ip, NODE_PORT + u16::from(n)));
    let outer = outer(n).map(|ip| at(ip, 80));
    let external = outer_external(n).map(|ip| at(ip, 80));
    [node_ports, outer, external].concat()
}

fn outer_external(n: u8) -> [IpAddr; 2] {
    [Ipv4Addr::new(198, 51, 100, n).into(), Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, n.into()).into()]
}

/// A Service with every kind of address.
fn outside(name: &str, n: u8) -> Service {
    service(name, n).load_balancer_ips(&outer(n)).external_ips(&outer_external(n))
}

fn on_both_nodes(service: Service) -> Service {
    service.endpoint("p1", &P1).endpoint_on("n2", "p3", &P3)
}

/// Everybody who answers, and as whom they see who asks.
#[track_caller]
fn answers(from: &NetNs, transport: Transport, address: SocketAddr) -> BTreeSet<Reply> {
    (0..40)
        .map(|_| {
            let answer = TestCluster::request(from, transport, address);
            answer.unwrap_or_else(|error| panic!("{address} over {transport:?}: {error}"))
        })
        .collect()
}

#[track_caller]
fn check(from: &NetNs, address: SocketAddr, expect: &[(&str, IpAddr)]) {
    let expect: BTreeSet<_> =
        expect.iter().map(|(name, sees)| Reply { name: (*name).to_owned(), sees: *sees }).collect();
    for transport in [Transport::Tcp, Transport::Udp] {
        assert_eq!(answers(from, transport, address), expect, "{address} over {transport:?}");
    }
}

/// Nobody answers, and nobody says so.
#[track_caller]
fn check_dropped(from: &NetNs, address: SocketAddr) {
    let error = TestCluster::request_unanswered(from, Transport::Udp, address).unwrap_err();
    // The kernel does say so to whoever sends a datagram from the very host.
    let is_dropped = [ErrorKind::WouldBlock, ErrorKind::PermissionDenied].contains(&error.kind());
    assert!(is_dropped, "{address}: {error}");
    let error = TestCluster::request_unanswered(from, Transport::Tcp, address).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{address}: {error}");
}

/// The client is told at once that nobody is there.
#[track_caller]
fn check_refused(from: &NetNs, address: SocketAddr) {
    for transport in [Transport::Tcp, Transport::Udp] {
        let error = TestCluster::request(from, transport, address).unwrap_err();
        // Whoever sends a datagram from the very host that refuses it is told so by the kernel itself.
        let refused_here = transport == Transport::Udp && error.kind() == ErrorKind::PermissionDenied;
        let is_refused = error.kind() == ErrorKind::ConnectionRefused || refused_here;
        assert!(is_refused, "{address} over {transport:?}: {error}");
    }
}

/// A cluster in which these Services are in force on n1.
struct Served {
    agent: Agent,
    cluster: TestCluster,
}

impl Served {
    fn or_skip(test: &str, backend: &str, services: &[Service], arguments: &[&str]) -> Option<Self> {
        Self::with(test, backend, services, |it| arguments.iter().fold(it, |it, argument| it.arg(*argument)))
    }

    fn with(
        test: &str,
        backend: &str,
        services: &[Service],
        setting: impl FnOnce(AgentCommand) -> AgentCommand,
    ) -> Option<Self> {
        let cluster = TestCluster::or_skip(&format!("{test}-{backend}"))?;
        cluster.write(services);
        let mut agent = cluster.start(&setting(cluster.command(backend)));
        agent.wait_until(LIMIT, || in_force(&cluster, services)).unwrap();
        Some(Self { cluster, agent })
    }

    fn write(&mut self, services: &[Service]) {
        self.cluster.write(services);
        self.agent.wait_until(LIMIT, || in_force(&self.cluster, services)).unwrap();
    }
}

/// What `dump` says of nftables on n1.
fn dump(cluster: &TestCluster) -> Vec<String> {
    let _there = cluster.n1.enter().unwrap();
    let output = Command::new(Build::Product.binary())
        .args(["dump", "--pin-dir"])
        .arg(cluster.sandbox().pins())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter(|it| it.starts_with("packets ")).map(ToOwned::to_owned).collect()
}

/// Whether exactly these Services' endpoints are behind their cluster IPs.
fn in_force(cluster: &TestCluster, services: &[Service]) -> bool {
    let mut expect = Vec::new();
    for service in services {
        for (ip, port) in
            service.cluster_ips.iter().flat_map(|ip| service.ports.iter().map(move |it| (ip, it)))
        {
            expect.push(format!("{}/{} cluster-ip", at(*ip, port.port), port.protocol));
            let endpoints = service.endpoints.iter().filter(|it| !service.internal_local || it.node == "n1");
            for endpoint in endpoints.flat_map(|it| &it.addresses).filter(|it| it.is_ipv4() == ip.is_ipv4()) {
                let frontend = at(*ip, port.port);
                expect.push(format!("{frontend}/{} -> {}", port.protocol, at(*endpoint, port.target)));
            }
        }
    }
    expect.sort_unstable();
    expect.dedup();
    let lines = dump(cluster);
    let frontends = lines.iter().filter_map(|it| it.strip_prefix("packets frontend "));
    let frontends = frontends.filter(|it| it.ends_with(" cluster-ip")).map(ToOwned::to_owned);
    let is_cluster_ip = |it: &&str| it.starts_with("10.96.") || it.starts_with("[fd00:96:");
    let endpoints = lines.iter().filter_map(|it| it.strip_prefix("packets endpoint ")).filter(is_cluster_ip);
    let endpoints = endpoints.filter_map(|it| {
        let (frontend, rest) = it.split_once(' ')?;
        Some(format!("{frontend} {}", rest.split_once(' ')?.1))
    });
    let mut found: Vec<_> = frontends.chain(endpoints).collect();
    found.sort_unstable();
    found.dedup();
    found == expect
}

/// Whether a test can change tables by hand, or is skipped.
fn nft_is_here(test: &str) -> bool {
    let is_here = Command::new("nft").arg("--version").output().is_ok_and(|it| it.status.success());
    if !is_here {
        tests::sandbox::skip(test, "nft is not installed");
    }
    is_here
}

fn nft(cluster: &TestCluster, arguments: &[&str]) -> String {
    let _there = cluster.n1.enter().unwrap();
    let output = Command::new("nft").args(arguments).output().unwrap();
    assert!(output.status.success(), "nft {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Whether the proxy that runs on n1 has brought its state into force.
fn agent_is_ready(cluster: &TestCluster) -> bool {
    let _there = cluster.n1.enter().unwrap();
    tests::http::get(at(Ipv4Addr::LOCALHOST.into(), 10256), "/readyz").is_ok_and(|it| it.status == 200)
}
