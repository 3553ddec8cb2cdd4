//! The packet path: traffic without a local socket, from outside, from pods and from the node itself, through nftables.

mod affinity;
mod avoided;
mod explain;
mod listing;
mod long_lived;
mod node;
pub(crate) mod policies;
mod sockets;
mod switch_over;
mod trace;
mod untracked;

use std::{
    collections::BTreeSet,
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    ops::Deref,
    process::Command,
    time::Duration,
};

use tests::{
    Agent, AgentCommand, ConnectLoad, NetNs, Service, TIMEOUT, TestCluster, Transport, connected_udp_socket,
    eventually, http, manifest, run,
    sandbox::CgroupGuard,
    scaled,
    test_cluster::{CLIENT, N1, N2, P1, P2, P3, Reply, TARGET},
};

const BACKENDS: [&str; 2] = ["nft", "ebpf"];
pub(crate) const NODE_PORT: u16 = 30_080;

/// A cluster IP of each family.
pub(crate) fn cluster_ips(n: u8) -> [IpAddr; 2] {
    [Ipv4Addr::new(10, 96, 0, n).into(), Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, n.into()).into()]
}

/// A load balancer IP of each family, which is routed to n1.
fn load_balancer_ips(n: u8) -> [IpAddr; 2] {
    [Ipv4Addr::new(203, 0, 113, n).into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, n.into()).into()]
}

/// An external IP of each family, which is routed to n1.
fn external_ips(n: u8) -> [IpAddr; 2] {
    [Ipv4Addr::new(198, 51, 100, n).into(), Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, n.into()).into()]
}

/// A Service over TCP and UDP without endpoints: port 80 at its cluster IPs, and the node port [`NODE_PORT`]` + n`.
pub(crate) fn internal(name: &str, n: u8) -> Service {
    Service::new(name, &cluster_ips(n)).tcp_and_udp(80, TARGET).node_ports(NODE_PORT + u16::from(n))
}

/// A Service like [`internal`], with load balancer IPs and external IPs.
fn external(name: &str, n: u8) -> Service {
    internal(name, n).load_balancer_ips(&load_balancer_ips(n)).external_ips(&external_ips(n))
}

pub(crate) fn at(ip: impl Into<IpAddr>, port: u16) -> SocketAddr {
    SocketAddr::new(ip.into(), port)
}

/// The frontends of an [`external`] Service at its cluster IPs.
fn internal_frontends(n: u8) -> [SocketAddr; 2] {
    cluster_ips(n).map(|ip| at(ip, 80))
}

/// The frontends of an [`external`] Service that can be reached from outside.
fn external_frontends(n: u8) -> Vec<SocketAddr> {
    let node_ports = N1.map(|ip| at(ip, NODE_PORT + u16::from(n)));
    [node_ports, load_balancer_ips(n).map(|ip| at(ip, 80)), external_ips(n).map(|ip| at(ip, 80))].concat()
}

fn on_both_nodes(service: Service) -> Service {
    service.endpoint("p1", &P1).endpoint_on("n2", "p3", &P3)
}

/// A connected UDP socket of the pod p2.
fn connect(it: &TestCluster, to: SocketAddr) -> UdpSocket {
    let _inside = (it.sandbox().enter().unwrap(), it.pods[1].enter().unwrap());
    connected_udp_socket(to).unwrap()
}

#[track_caller]
pub(crate) fn replies(from: &NetNs, transport: Transport, address: SocketAddr) -> BTreeSet<Reply> {
    (0..40)
        .map(|_| {
            let reply = TestCluster::request(from, transport, address);
            reply.unwrap_or_else(|error| panic!("{address} over {transport:?}: {error}"))
        })
        .collect()
}

/// The pod that replies over TCP.
#[track_caller]
fn server(from: &NetNs, address: SocketAddr) -> String {
    let reply = TestCluster::request(from, Transport::Tcp, address);
    reply.unwrap_or_else(|error| panic!("{address}: {error}")).name
}

/// Checks which pods reply, and with which source address they see the requests.
#[track_caller]
pub(crate) fn check(from: &NetNs, address: SocketAddr, expected: &[(&str, IpAddr)]) {
    let reply = |(name, source): &(&str, IpAddr)| Reply { name: (*name).to_owned(), source: *source };
    let expected: BTreeSet<_> = expected.iter().map(reply).collect();
    for transport in [Transport::Tcp, Transport::Udp] {
        assert_eq!(replies(from, transport, address), expected, "{address} over {transport:?}");
    }
}

/// Checks that requests are dropped without an ICMP error.
#[track_caller]
fn check_dropped(from: &NetNs, address: SocketAddr) {
    let error = TestCluster::request_unanswered(from, Transport::Udp, address).unwrap_err();
    // On the dropping host itself, the kernel reports the drop to the sender of a datagram.
    let is_dropped = [ErrorKind::WouldBlock, ErrorKind::PermissionDenied].contains(&error.kind());
    assert!(is_dropped, "{address}: {error}");
    let error = TestCluster::request_unanswered(from, Transport::Tcp, address).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{address}: {error}");
}

/// Checks that requests are refused at once.
#[track_caller]
fn check_refused(from: &NetNs, address: SocketAddr) {
    for transport in [Transport::Tcp, Transport::Udp] {
        let error = TestCluster::request(from, transport, address).unwrap_err();
        // On the refusing host itself, the kernel reports EPERM to the sender of a datagram.
        let is_refused_here = transport == Transport::Udp && error.kind() == ErrorKind::PermissionDenied;
        let is_refused = error.kind() == ErrorKind::ConnectionRefused || is_refused_here;
        assert!(is_refused, "{address} over {transport:?}: {error}");
    }
}

/// A cluster with a proxy on n1.
struct RunningCluster {
    backend: &'static str,
    agent: Agent,
    /// While the sockets of this process are those of pods and nodes with the proxy.
    _inside: Option<CgroupGuard>,
    cluster: TestCluster,
}

impl Deref for RunningCluster {
    type Target = TestCluster;

    fn deref(&self) -> &TestCluster {
        &self.cluster
    }
}

impl RunningCluster {
    /// Starts a proxy, and waits until exactly these Services are active and it is ready: with eBPF, once it serves sockets.
    fn or_skip(backend: &'static str, services: &[Service], arguments: &[&str]) -> Option<Self> {
        Self::with(backend, services, |it| it.args(arguments))
    }

    fn with(
        backend: &'static str,
        services: &[Service],
        command: impl FnOnce(AgentCommand) -> AgentCommand,
    ) -> Option<Self> {
        let cluster = TestCluster::or_skip()?;
        cluster.write(services);
        let mut agent = cluster.start(&command(cluster.command(backend)));
        agent.wait_until(TIMEOUT, || is_active(&cluster, services) && is_ready(&cluster)).unwrap();
        Some(Self { backend, agent, _inside: None, cluster })
    }

    fn each(services: &[Service], arguments: &[&str], test: impl Fn(Self)) {
        for backend in BACKENDS {
            let Some(cluster) = Self::or_skip(backend, services, arguments) else { return };
            eprintln!("with --backend={backend}");
            test(cluster);
        }
    }

    /// From now on the sockets of this process are those of pods and nodes with the proxy.
    fn enter(mut self) -> Self {
        self._inside = Some(self.sandbox().enter().unwrap());
        self
    }

    fn killed(self) -> TestCluster {
        self.agent.kill9().unwrap();
        self.cluster
    }

    /// Writes Services and waits until exactly these are active.
    #[track_caller]
    fn apply(&mut self, services: &[Service]) {
        self.cluster.write(services);
        self.agent.wait_until(TIMEOUT, || is_active(&self.cluster, services)).unwrap();
    }
}

/// Writes a ServiceCIDR of all cluster IPs and waits until it is active.
#[track_caller]
fn apply_service_cidr(cluster: &TestCluster) {
    let text = "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: kubernetes}\n\
                spec: {cidrs: [10.96.0.0/16, 'fd00:96::/112']}\n";
    manifest::write_atomically(&cluster.manifests().join("service-cidr.yaml"), text).unwrap();
    assert!(eventually(TIMEOUT, || has_service_cidr(cluster)));
}

/// Whether addresses in a ServiceCIDR that no Service has are dropped.
fn has_service_cidr(cluster: &TestCluster) -> bool {
    nft(cluster, &["list", "chains"]).contains("unassigned-forward")
}

/// Connects continuously from the client, at an interval in milliseconds (scaled).
fn start_load(
    cluster: &TestCluster,
    transport: Transport,
    address: SocketAddr,
    threads: usize,
    interval: u64,
) -> ConnectLoad {
    let interval = scaled(Duration::from_millis(interval));
    cluster.client.run(|| ConnectLoad::start(transport, address, threads, interval))
}

fn start_ready(cluster: &TestCluster, command: &AgentCommand) -> Agent {
    let mut agent = cluster.start(command);
    agent.wait_until(TIMEOUT, || is_ready(cluster)).unwrap();
    agent
}

/// The lines of `dump` about nftables on n1.
fn dump(cluster: &TestCluster) -> Vec<String> {
    let output = cluster.n1.run(|| run(&mut cluster.cli("dump")));
    output.stdout.lines().filter(|it| it.starts_with("packets ")).map(ToOwned::to_owned).collect()
}

/// Whether the cluster IPs of exactly these Services are active, with exactly their endpoints.
fn is_active(cluster: &TestCluster, services: &[Service]) -> bool {
    let mut expected = BTreeSet::new();
    for service in services {
        let ports = service.cluster_ips.iter().flat_map(|ip| service.ports.iter().map(move |it| (*ip, it)));
        for (ip, port) in ports {
            let frontend = format!("{}/{}", at(ip, port.port), port.protocol);
            expected.insert(format!("{frontend} cluster-ip"));
            let endpoints = service.endpoints.iter().filter(|it| it.ready || it.terminating);
            let endpoints = endpoints.filter(|it| !service.internal_local || it.node == "n1");
            for endpoint in endpoints.flat_map(|it| &it.addresses).filter(|it| it.is_ipv4() == ip.is_ipv4()) {
                expected.insert(format!("{frontend} -> {}", at(*endpoint, port.target)));
            }
        }
    }
    let lines = dump(cluster);
    let frontends = lines.iter().filter_map(|it| it.strip_prefix("packets frontend "));
    let frontends = frontends.filter(|it| it.ends_with(" cluster-ip")).map(ToOwned::to_owned);
    let is_cluster_ip = |it: &&str| it.starts_with("10.96.") || it.starts_with("[fd00:96:");
    let endpoints = lines.iter().filter_map(|it| it.strip_prefix("packets endpoint ")).filter(is_cluster_ip);
    let endpoints = endpoints.filter_map(|it| {
        let (frontend, rest) = it.split_once(' ')?;
        Some(format!("{frontend} {}", rest.split_once(' ')?.1))
    });
    frontends.chain(endpoints).collect::<BTreeSet<_>>() == expected
}

/// Runs `nft` on n1.
#[track_caller]
fn nft(cluster: &TestCluster, arguments: &[&str]) -> String {
    cluster.n1.run(|| run(Command::new("nft").args(arguments)).success())
}

fn is_ready(cluster: &TestCluster) -> bool {
    cluster.n1.run(http::is_ready)
}
