//! A small cluster: two nodes, pods behind them, and a client outside, each in a network namespace of its own.
//!
//! Packets are routed as in a real cluster: nodes forward, pods have a route to their node only, and what must return
//! through a node does so because of its source address.
//!
//! No client is in the sandbox's cgroup unless a test enters it, so that traffic takes the packet path.
//!
//! ```text
//!                 lan, 192.168.50.0/24 and fd00:50::/64
//!   client .100 ──────┬─────────────────┬──────
//!                  n1 .1             n2 .2
//!                   ├─ p1 10.244.1.10   └─ p3 10.244.2.10
//!                   └─ p2 10.244.1.11
//! ```

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    process::Command,
};

use anyhow::Result;

use crate::{
    Agent, AgentCommand, Build, EchoServer, NetNs, Sandbox, Transport, agent,
    client::request_unanswered,
    manifest::{self, Service},
    request,
};

/// The port that every pod serves, over TCP and UDP.
pub const TARGET: u16 = 8080;
pub const CLIENT: [IpAddr; 2] = addresses([192, 168, 50, 100], [0xfd00, 0x50, 0, 0, 0, 0, 0, 0x100]);
/// The addresses of node n1, where the proxy runs.
pub const N1: [IpAddr; 2] = addresses([192, 168, 50, 1], [0xfd00, 0x50, 0, 0, 0, 0, 0, 1]);
pub const N2: [IpAddr; 2] = addresses([192, 168, 50, 2], [0xfd00, 0x50, 0, 0, 0, 0, 0, 2]);
/// A pod on n1.
pub const P1: [IpAddr; 2] = addresses([10, 244, 1, 10], [0xfd00, 0x244, 1, 0, 0, 0, 0, 0x10]);
/// Another pod on n1.
pub const P2: [IpAddr; 2] = addresses([10, 244, 1, 11], [0xfd00, 0x244, 1, 0, 0, 0, 0, 0x11]);
/// The pod on n2.
pub const P3: [IpAddr; 2] = addresses([10, 244, 2, 10], [0xfd00, 0x244, 2, 0, 0, 0, 0, 0x10]);

/// The options of `ip` for the families, in the order in which addresses of both are given.
pub(crate) const FAMILIES: [&str; 2] = ["-4", "-6"];

pub(crate) const fn addresses(v4: [u8; 4], v6: [u16; 8]) -> [IpAddr; 2] {
    [IpAddr::V4(Ipv4Addr::from_octets(v4)), IpAddr::V6(Ipv6Addr::from_segments(v6))]
}

/// The cluster, with a folder of manifests and a sandbox for the proxy on n1.
#[derive(Debug)]
pub struct TestCluster {
    /// The client outside. Its default route leads to n1.
    pub client: NetNs,
    /// The node where the proxy runs.
    pub n1: NetNs,
    /// The other node, without a proxy.
    pub n2: NetNs,
    pub pods: [NetNs; 3],
    _lan: NetNs,
    _servers: Vec<EchoServer>,
    sandbox: Sandbox,
}

impl TestCluster {
    /// Makes a cluster in which every pod serves.
    pub fn or_skip() -> Option<Self> {
        let sandbox = Sandbox::or_skip()?;
        Some(Self::new(sandbox).expect("the machine has everything a test needs"))
    }

    fn new(sandbox: Sandbox) -> Result<Self> {
        let (lan, client, n1, n2) = (new_lan()?, new_netns()?, new_netns()?, new_netns()?);
        for (name, host, addresses) in [("client", &client, CLIENT), ("n1", &n1, N1), ("n2", &n2, N2)] {
            join(&lan, name, host, addresses)?;
        }
        forward(&n1)?;
        forward(&n2)?;
        let routes = [
            (&client, ["default"; 2], N1),
            (&n1, ["default"; 2], CLIENT),
            (&n2, ["default"; 2], CLIENT),
            (&n1, ["10.244.2.0/24", "fd00:244:2::/64"], N2),
            (&n2, ["10.244.1.0/24", "fd00:244:1::/64"], N1),
            // The Services' addresses.
            (&n2, ["10.96.0.0/16", "fd00:96::/64"], N1),
        ];
        for (host, networks, via) in routes {
            route(host, networks, via)?;
        }
        let pods = [pod(&n1, "p1", P1)?, pod(&n1, "p2", P2)?, pod(&n2, "p3", P3)?];
        let mut servers = Vec::new();
        for ((name, pod), addresses) in ["p1", "p2", "p3"].iter().zip(&pods).zip([P1, P2, P3]) {
            let _inside = pod.enter()?;
            for address in addresses {
                servers.push(EchoServer::start_showing_source(name, SocketAddr::new(address, TARGET))?);
            }
        }
        fs::create_dir(sandbox.files().join("manifests"))?;
        Ok(Self { client, n1, n2, pods, _lan: lan, _servers: servers, sandbox })
    }

    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    pub fn manifests(&self) -> PathBuf {
        self.sandbox.files().join("manifests")
    }

    /// The command line of the proxy on n1, with a value of `--backend`.
    pub fn command(&self, backend: &str) -> AgentCommand {
        self.default_command().arg(format!("--backend={backend}")).arg("--packets=nft")
    }

    /// The command line of the proxy on n1, with the default backend and without the packet path.
    pub fn default_command(&self) -> AgentCommand {
        AgentCommand::run(&Build::Product.binary(), &self.sandbox, &self.manifests(), "n1")
    }

    /// A subcommand of the binary that finds the proxy; to be run on n1.
    pub fn cli(&self, subcommand: &str) -> Command {
        agent::cli(&Build::Product.binary(), &self.sandbox, subcommand)
    }

    #[must_use]
    pub fn start(&self, command: &AgentCommand) -> Agent {
        self.n1.run(|| command.start(&self.sandbox).expect("the proxy starts"))
    }

    /// Writes the Services and both Nodes to one file, atomically.
    pub fn write(&self, services: &[Service]) {
        let mut text: String = services.iter().map(ToString::to_string).collect();
        text += &(node_manifest(1, &N1) + &node_manifest(2, &N2));
        manifest::write_atomically(&self.manifests().join("all.yaml"), &text)
            .expect("the folder of manifests is writable");
    }

    pub fn request(from: &NetNs, transport: Transport, address: SocketAddr) -> io::Result<Reply> {
        Reply::parse(&from.run(|| request(transport, address))?)
    }

    pub fn request_unanswered(from: &NetNs, transport: Transport, address: SocketAddr) -> io::Result<Reply> {
        Reply::parse(&from.run(|| request_unanswered(transport, address))?)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reply {
    pub name: String,
    /// The source address of the request, as the pod saw it.
    pub source: IpAddr,
}

impl Reply {
    fn parse(text: &str) -> io::Result<Self> {
        let (name, source) = text.split_once(' ').ok_or(io::ErrorKind::InvalidData)?;
        let source = source.parse().map_err(|_| io::ErrorKind::InvalidData)?;
        Ok(Self { name: name.to_owned(), source })
    }
}

/// A namespace in which IPv6 addresses are usable at once.
pub(crate) fn new_netns() -> Result<NetNs> {
    let namespace = NetNs::new()?;
    namespace.set_sysctl("ipv6/conf/default/accept_dad", "0")?;
    Ok(namespace)
}

/// A bridge, to which hosts are joined.
pub(crate) fn new_lan() -> Result<NetNs> {
    let lan = new_netns()?;
    lan.ip(&["link", "add", "br0", "type", "bridge"])?;
    lan.ip(&["link", "set", "br0", "up"])?;
    Ok(lan)
}

/// Connects a host to a bridge; its interface `eth0` gets these addresses.
pub(crate) fn join(lan: &NetNs, name: &str, host: &NetNs, addresses: [IpAddr; 2]) -> Result<()> {
    lan.connect_veth(name, host, "eth0")?;
    lan.ip(&["link", "set", name, "master", "br0"])?;
    add_addresses(host, "eth0", addresses)
}

pub(crate) fn add_addresses(host: &NetNs, interface: &str, addresses: [IpAddr; 2]) -> Result<()> {
    let mut lengths = addresses.iter().zip([24, 64]);
    lengths.try_for_each(|(it, length)| host.add_interface_address(&format!("{it}/{length}"), interface))
}

pub(crate) fn route(host: &NetNs, networks: [&str; 2], via: [IpAddr; 2]) -> Result<()> {
    let mut routes = FAMILIES.iter().zip(networks).zip(via);
    routes.try_for_each(|((family, network), via)| {
        host.ip(&[family, "route", "add", network, "via", &via.to_string()])
    })
}

pub(crate) fn forward(host: &NetNs) -> Result<()> {
    host.set_sysctl("ipv4/ip_forward", "1")?;
    host.set_sysctl("ipv6/conf/all/forwarding", "1")
}

/// The Node number `n`, whose pods have the networks 10.244.n.0/24 and fd00:244:n::/64.
pub(crate) fn node_manifest(n: u8, addresses: &[IpAddr]) -> String {
    let node = manifest::node_with_addresses(&format!("n{n}"), addresses);
    format!("---\n{node}spec:\n  podCIDRs: [10.244.{n}.0/24, 'fd00:244:{n:x}::/64']\n")
}

/// A pod as most network plugins make it: a veth pair to its node, and a default route through it.
pub(crate) fn pod(node: &NetNs, name: &str, addresses: [IpAddr; 2]) -> Result<NetNs> {
    const GATEWAYS: [&str; 2] = ["169.254.1.1", "fe80::1"];
    let pod = new_netns()?;
    node.connect_veth(name, &pod, "eth0")?;
    for ((address, gateway), family) in addresses.iter().zip(GATEWAYS).zip(FAMILIES) {
        let (length, gateway_length) = if address.is_ipv4() { (32, 32) } else { (128, 64) };
        pod.add_interface_address(&format!("{address}/{length}"), "eth0")?;
        node.add_interface_address(&format!("{gateway}/{gateway_length}"), name)?;
        node.ip(&[family, "route", "add", &format!("{address}/{length}"), "dev", name])?;
        pod.ip(&[family, "route", "add", gateway, "dev", "eth0"])?;
        pod.ip(&[family, "route", "add", "default", "via", gateway, "dev", "eth0"])?;
    }
    Ok(pod)
}
