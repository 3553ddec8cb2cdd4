//! A small cluster: two nodes, pods behind them, and a client outside; each in a network namespace of its own.
//! The one rule: a packet finds its way as it does in a real one. Nodes forward, pods know only their node, and what has to
//! come back through a node does so because of its source.
//!
//! Nobody who asks here is in the sandbox's cgroup: no socket is led by eBPF, so that every packet is.
//!
//! ```text
//!                 lan, 192.168.50.0/24 and fd00:50::/64
//!   client .100 ──────┬─────────────────┬──────
//!                  n1 .1             n2 .2
//!                   ├─ p1 10.244.1.10   └─ p3 10.244.2.10
//!                   └─ p2 10.244.1.11
//! ```

use std::{
    fs,
    io::{self, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::Result;

use crate::{
    Agent, Build, NetNs, Sandbox, Transport,
    agent::AgentCommand,
    client::request_unanswered,
    manifest::{self, Service},
    request,
};

/// The port that every pod serves, over TCP and UDP.
pub const TARGET: u16 = 8080;
/// The client's addresses.
pub const CLIENT: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 168, 50, 100)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0x50, 0, 0, 0, 0, 0, 0x100)),
];
/// The addresses of node n1, where the proxy runs.
pub const N1: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 168, 50, 1)), IpAddr::V6(Ipv6Addr::new(0xfd00, 0x50, 0, 0, 0, 0, 0, 1))];
/// The addresses of node n2.
pub const N2: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 168, 50, 2)), IpAddr::V6(Ipv6Addr::new(0xfd00, 0x50, 0, 0, 0, 0, 0, 2))];
/// Pods on n1.
pub const P1: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 244, 1, 10)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0x244, 1, 0, 0, 0, 0, 0x10)),
];
/// The other one.
pub const P2: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 244, 1, 11)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0x244, 1, 0, 0, 0, 0, 0x11)),
];
/// The pod on n2.
pub const P3: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 244, 2, 10)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0x244, 2, 0, 0, 0, 0, 0x10)),
];

/// The cluster, with a folder of manifests and a sandbox for the proxy on n1.
#[derive(Debug)]
pub struct TestCluster {
    /// The client outside. What is neither on the lan nor its own it sends to n1.
    pub client: NetNs,
    /// The node where the proxy runs.
    pub n1: NetNs,
    /// The other node; nobody translates there.
    pub n2: NetNs,
    /// The pods p1, p2 and p3.
    pub pods: [NetNs; 3],
    _lan: NetNs,
    _servers: Vec<Witness>,
    sandbox: Sandbox,
}

impl TestCluster {
    /// Makes one in which every pod serves, or says why the test that wants it is skipped.
    ///
    /// # Panics
    ///
    /// If the machine has everything and it still fails.
    #[must_use]
    pub fn or_skip(name: &str) -> Option<Self> {
        let sandbox = Sandbox::or_skip(name)?;
        Some(Self::new(sandbox).expect("the machine has everything a test needs"))
    }

    fn new(sandbox: Sandbox) -> Result<Self> {
        let lan = place()?;
        lan.ip(&["link", "add", "br0", "type", "bridge"])?;
        lan.ip(&["link", "set", "br0", "up"])?;
        let host = |name: &str, addresses: [IpAddr; 2]| -> Result<NetNs> {
            let host = place()?;
            lan.join(name, &host, "eth0")?;
            lan.ip(&["link", "set", name, "master", "br0"])?;
            for (address, length) in addresses.iter().zip([24, 64]) {
                add(&host, &format!("{address}/{length}"), "eth0")?;
            }
            Ok(host)
        };
        let client = host("client", CLIENT)?;
        for (family, via) in ["-4", "-6"].iter().zip(N1) {
            client.ip(&[family, "route", "add", "default", "via", &via.to_string()])?;
        }
        let n1 = host("n1", N1)?;
        let n2 = host("n2", N2)?;
        for node in [&n1, &n2] {
            node.set("ipv4/ip_forward", "1")?;
            node.set("ipv6/conf/all/forwarding", "1")?;
            for (family, via) in ["-4", "-6"].iter().zip(CLIENT) {
                node.ip(&[family, "route", "add", "default", "via", &via.to_string()])?;
            }
        }
        let routes = [
            (&n1, ["10.244.2.0/24", "fd00:244:2::/64"], N2),
            (&n2, ["10.244.1.0/24", "fd00:244:1::/64"], N1),
            // What is not the cluster's comes and goes by n1.
            (&n2, ["10.96.0.0/16", "fd00:96::/64"], N1),
        ];
        for (node, networks, via) in routes {
            for ((family, network), via) in ["-4", "-6"].iter().zip(networks).zip(via) {
                node.ip(&[family, "route", "add", network, "via", &via.to_string()])?;
            }
        }
        let pods = [pod(&n1, "p1", P1)?, pod(&n1, "p2", P2)?, pod(&n2, "p3", P3)?];
        let mut servers = Vec::new();
        for ((name, pod), addresses) in ["p1", "p2", "p3"].iter().zip(&pods).zip([P1, P2, P3]) {
            let _there = pod.enter()?;
            for address in addresses {
                servers.push(Witness::start(name, SocketAddr::new(address, TARGET))?);
            }
        }
        fs::create_dir(sandbox.files().join("manifests"))?;
        Ok(Self { client, n1, n2, pods, _lan: lan, _servers: servers, sandbox })
    }

    /// Its sandbox.
    #[must_use]
    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// The folder of manifests.
    #[must_use]
    pub fn manifests(&self) -> PathBuf {
        self.sandbox.files().join("manifests")
    }

    /// How to start the proxy on n1, with a backend.
    #[must_use]
    pub fn command(&self, backend: &str) -> AgentCommand {
        AgentCommand::run(&Build::Product.binary(), &self.sandbox, &self.manifests(), "n1")
            .arg(format!("--backend={backend}"))
            .arg("--packets=nft")
    }

    /// Starts the proxy on n1.
    ///
    /// # Panics
    ///
    /// If it cannot be started.
    #[must_use]
    pub fn start(&self, setting: &AgentCommand) -> Agent {
        let _there = self.n1.enter().expect("a thread can enter n1");
        setting.start(&self.sandbox).expect("the proxy starts")
    }

    /// Writes the Services, and both Nodes, all of them in one moment.
    ///
    /// # Panics
    ///
    /// If the folder cannot be written to.
    pub fn write(&self, services: &[Service]) {
        let mut text: Vec<_> = services.iter().map(ToString::to_string).collect();
        for (name, addresses, number) in [("n1", N1, 1), ("n2", N2, 2)] {
            let cidrs = format!("spec:\n  podCIDRs: [10.244.{number}.0/24, 'fd00:244:{number}::/64']\n");
            text.push(manifest::node_with_addresses(name, &addresses) + &cidrs);
        }
        manifest::write_atomically(&self.manifests().join("all.yaml"), &text.join("---\n"))
            .expect("manifests are written");
    }

    /// Asks an address from somewhere: who answers, and as whom it sees who asks.
    ///
    /// # Errors
    ///
    /// The system call's.
    ///
    /// # Panics
    ///
    /// If the place cannot be entered.
    pub fn request(from: &NetNs, transport: Transport, address: SocketAddr) -> io::Result<Reply> {
        Self::request_by(request, from, transport, address)
    }

    /// The same where nobody should answer.
    ///
    /// # Errors
    ///
    /// The system call's.
    ///
    /// # Panics
    ///
    /// If the place cannot be entered.
    pub fn request_unanswered(from: &NetNs, transport: Transport, address: SocketAddr) -> io::Result<Reply> {
        Self::request_by(request_unanswered, from, transport, address)
    }

    fn request_by(
        request: fn(Transport, SocketAddr) -> io::Result<String>,
        from: &NetNs,
        transport: Transport,
        address: SocketAddr,
    ) -> io::Result<Reply> {
        let _there = from.enter().expect("a thread can enter a namespace of its own");
        let answer = request(transport, address)?;
        let (name, sees) = answer.split_once(' ').ok_or(io::ErrorKind::InvalidData)?;
        let sees = sees.parse().map_err(|_| io::ErrorKind::InvalidData)?;
        Ok(Reply { name: name.to_owned(), sees })
    }
}

/// What a pod says.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reply {
    /// Its name.
    pub name: String,
    /// The address that it was asked from.
    pub sees: IpAddr,
}

/// A namespace in which an address of IPv6 is good as soon as it is there.
fn place() -> Result<NetNs> {
    let place = NetNs::new()?;
    place.set("ipv6/conf/default/accept_dad", "0")?;
    Ok(place)
}

fn add(host: &NetNs, address: &str, device: &str) -> Result<()> {
    let nodad = if address.contains(':') { &["nodad"][..] } else { &[] };
    host.ip(&[&["address", "add", address, "dev", device], nodad].concat())
}

/// A pod as most networks make it: a cable to its node, and every packet goes there.
fn pod(node: &NetNs, name: &str, addresses: [IpAddr; 2]) -> Result<NetNs> {
    const GATEWAYS: [&str; 2] = ["169.254.1.1", "fe80::1"];
    let pod = place()?;
    node.join(name, &pod, "eth0")?;
    for ((address, gateway), family) in addresses.iter().zip(GATEWAYS).zip(["-4", "-6"]) {
        let length = if address.is_ipv4() { 32 } else { 128 };
        add(&pod, &format!("{address}/{length}"), "eth0")?;
        add(node, &format!("{gateway}/{}", if address.is_ipv4() { 32 } else { 64 }), name)?;
        node.ip(&[family, "route", "add", &format!("{address}/{length}"), "dev", name])?;
        pod.ip(&[family, "route", "add", gateway, "dev", "eth0"])?;
        pod.ip(&[family, "route", "add", "default", "via", gateway, "dev", "eth0"])?;
    }
    Ok(pod)
}

/// A server that says its name, and who asked: `NAME ADDRESS`. It stops when dropped.
#[derive(Debug)]
struct Witness {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Witness {
    fn start(name: &str, address: SocketAddr) -> Result<Self> {
        const TICK: Duration = Duration::from_millis(20);
        let stop = Arc::new(AtomicBool::new(false));
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let tcp = {
            let (name, stop) = (name.to_owned(), Arc::clone(&stop));
            move || {
                while !stop.load(Ordering::Relaxed) {
                    match listener.accept() {
                        // Who has gone meanwhile is told nothing.
                        Ok((mut stream, from)) => drop(writeln!(stream, "{name} {}", from.ip())),
                        Err(_) => thread::sleep(Duration::from_millis(1)),
                    }
                }
            }
        };
        let socket = UdpSocket::bind(address)?;
        socket.set_read_timeout(Some(TICK))?;
        let udp = {
            let (name, stop) = (name.to_owned(), Arc::clone(&stop));
            move || {
                let mut question = [0; 256];
                while !stop.load(Ordering::Relaxed) {
                    if let Ok((_, from)) = socket.recv_from(&mut question) {
                        // The same.
                        let _ = socket.send_to(format!("{name} {}", from.ip()).as_bytes(), from);
                    }
                }
            }
        };
        Ok(Self { stop, threads: vec![thread::spawn(tcp), thread::spawn(udp)] })
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // It panicked: its test sees that nobody answers.
            let _ = thread.join();
        }
    }
}
