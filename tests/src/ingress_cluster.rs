//! A cluster behind a router: nodes with a proxy and a pod each, and a client whose connections the router spreads over the
//! nodes that are its next hops.
//!
//! ```text
//!   client 198.18.0.100 ── router ──┬── n1 192.168.50.1 ── p1 10.244.1.10
//!                                   ├── n2 192.168.50.2 ── p2 10.244.2.10
//!                                   └── …
//! ```
//! IPv6 has the same numbers. The router hashes addresses and ports, so that another set of next hops moves connections.
//! A method panics if the test cannot go on.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    process::Command,
};

use anyhow::Result;

use crate::{
    Agent, AgentCommand, Build, EchoServer, NetNs, Sandbox,
    manifest::{self, Service},
    requirements::requirements,
    run,
    skip::{current_test, skip},
    test_cluster::{TARGET, new_netns, pod},
};

/// The client's addresses.
pub const OUTSIDE_CLIENT: [IpAddr; 2] = addresses([198, 18, 0, 100], [0x2001, 0x2, 0, 0, 0, 0, 0, 0x100]);
const ROUTER: [IpAddr; 2] = addresses([198, 18, 0, 1], [0x2001, 0x2, 0, 0, 0, 0, 0, 1]);
/// The router's addresses for the nodes.
const GATEWAY: [IpAddr; 2] = addresses([192, 168, 50, 254], [0xfd00, 0x50, 0, 0, 0, 0, 0, 0xfe]);
const FAMILIES: [&str; 2] = ["-4", "-6"];

const fn addresses(v4: [u8; 4], v6: [u16; 8]) -> [IpAddr; 2] {
    [IpAddr::V4(Ipv4Addr::from_octets(v4)), IpAddr::V6(Ipv6Addr::from_segments(v6))]
}

/// The cluster.
#[derive(Debug)]
pub struct IngressCluster {
    /// The client outside.
    pub client: NetNs,
    router: NetNs,
    lan: NetNs,
    /// The nodes, from number 1.
    pub nodes: Vec<IngressNode>,
    manifests: Sandbox,
}

/// A node of it.
#[derive(Debug)]
pub struct IngressNode {
    number: u8,
    /// The node itself.
    pub netns: NetNs,
    /// The network namespace of its pod.
    pub pod: NetNs,
    _servers: Vec<EchoServer>,
    /// The place of its proxy.
    pub sandbox: Sandbox,
    /// Its proxy, while it runs.
    pub agent: Option<Agent>,
}

impl IngressNode {
    /// Its name, and that of its pod's server, which replies with the source address of the client.
    #[must_use]
    pub fn name(&self) -> String {
        format!("n{}", self.number)
    }

    /// Its addresses.
    #[must_use]
    pub fn addresses(&self) -> [IpAddr; 2] {
        node_addresses(self.number)
    }

    /// Its pod's addresses.
    #[must_use]
    pub fn pod_addresses(&self) -> [IpAddr; 2] {
        pod_addresses(self.number)
    }
}

fn node_addresses(number: u8) -> [IpAddr; 2] {
    addresses([192, 168, 50, number], [0xfd00, 0x50, 0, 0, 0, 0, 0, number.into()])
}

fn pod_addresses(number: u8) -> [IpAddr; 2] {
    addresses([10, 244, number, 10], [0xfd00, 0x244, number.into(), 0, 0, 0, 0, 0x10])
}

impl IngressCluster {
    /// Makes a cluster of so many nodes, or reports why the current test is skipped. No proxy runs, and the router has no next
    /// hop.
    #[must_use]
    pub fn or_skip(nodes: u8) -> Option<Self> {
        if let Err(missing) = requirements() {
            skip(&missing.join("; "));
            return None;
        }
        Some(Self::new(nodes).expect("the machine has everything a test needs"))
    }

    fn new(nodes: u8) -> Result<Self> {
        let (lan, router, client) = (new_netns()?, new_netns()?, new_netns()?);
        lan.ip(&["link", "add", "br0", "type", "bridge"])?;
        lan.ip(&["link", "set", "br0", "up"])?;
        let join = |name: &str, host: &NetNs, addresses: [IpAddr; 2]| -> Result<()> {
            lan.connect_veth(name, host, "eth0")?;
            lan.ip(&["link", "set", name, "master", "br0"])?;
            add_addresses(host, "eth0", addresses)
        };
        join("router", &router, GATEWAY)?;
        router.connect_veth("client", &client, "eth0")?;
        add_addresses(&router, "client", ROUTER)?;
        add_addresses(&client, "eth0", OUTSIDE_CLIENT)?;
        route(&client, ["default"; 2], ROUTER)?;
        forward(&router)?;
        for version in ["ipv4", "ipv6"] {
            router.set_sysctl(&format!("{version}/fib_multipath_hash_policy"), "1")?;
        }
        let name: String = current_test().chars().take(40).collect();
        let mut made = Vec::new();
        for number in 1..=nodes {
            let netns = new_netns()?;
            join(&format!("n{number}"), &netns, node_addresses(number))?;
            forward(&netns)?;
            route(&netns, ["default"; 2], GATEWAY)?;
            for other in (1..=nodes).filter(|it| *it != number) {
                let networks = [format!("10.244.{other}.0/24"), format!("fd00:244:{other:x}::/64")];
                route(&netns, [&networks[0], &networks[1]], node_addresses(other))?;
            }
            let pod = pod(&netns, "pod", pod_addresses(number))?;
            let mut servers = Vec::new();
            for address in pod_addresses(number) {
                let _inside = pod.enter()?;
                let reply = |name: &str, source| format!("{name} {source}");
                let address = SocketAddr::new(address, TARGET);
                servers.push(EchoServer::start_with(&format!("n{number}"), address, reply)?);
            }
            let sandbox = Sandbox::new(&format!("{name}-n{number}"))?;
            made.push(IngressNode { number, netns, pod, _servers: servers, sandbox, agent: None });
        }
        let manifests = Sandbox::new(&name)?;
        fs::create_dir(manifests.files().join("manifests"))?;
        Ok(Self { client, router, lan, nodes: made, manifests })
    }

    /// The folder of manifests, which all proxies read.
    #[must_use]
    pub fn manifests(&self) -> PathBuf {
        self.manifests.files().join("manifests")
    }

    /// Writes the Services and the Nodes to one file, atomically.
    pub fn write(&self, services: &[Service]) {
        let mut text: String = services.iter().map(ToString::to_string).collect();
        for node in &self.nodes {
            let n = node.number;
            let cidrs = format!("spec:\n  podCIDRs: [10.244.{n}.0/24, 'fd00:244:{n:x}::/64']\n");
            text +=
                &format!("---\n{}{cidrs}", manifest::node_with_addresses(&node.name(), &node.addresses()));
        }
        manifest::write_atomically(&self.manifests().join("all.yaml"), &text)
            .expect("the folder of manifests is writable");
    }

    /// Starts the proxy of a node, with more arguments, beside one that may have been killed.
    pub fn start(&mut self, node: usize, arguments: &[&str]) {
        self.start_build(node, Build::Product, |it| it.args(arguments.iter().copied()));
    }

    /// The same of another build, with a changed command line.
    pub fn start_build(
        &mut self,
        node: usize,
        build: Build,
        change: impl FnOnce(AgentCommand) -> AgentCommand,
    ) {
        let manifests = self.manifests();
        let node = &mut self.nodes[node];
        let command = AgentCommand::run(&build.binary(), &node.sandbox, &manifests, &node.name());
        let command = change(command.args(["--backend=ebpf", "--packets=nft"]));
        node.agent = Some(node.netns.run(|| command.start(&node.sandbox).expect("the proxy starts")));
    }

    /// The host that the cables of nodes lead to, in interfaces with their names.
    pub fn lan(&self) -> &NetNs {
        &self.lan
    }

    /// Pulls a node's cable out, or puts it in.
    pub fn plug(&self, node: usize, is_in: bool) {
        let state = if is_in { "up" } else { "down" };
        self.lan.ip(&["link", "set", &self.nodes[node].name(), state]).expect("the cable is there");
    }

    /// Removes what the proxy of a node has left.
    pub fn cleanup(&self, node: usize) {
        let IngressNode { netns, sandbox, .. } = &self.nodes[node];
        let mut command = Command::new(Build::Product.binary());
        command.args(["cleanup", "--pin-dir"]).arg(sandbox.pins());
        let _ = netns.run(|| run(&mut command)).success();
    }

    /// Makes these nodes, by index, the next hops of a network of each family.
    pub fn set_next_hops(&self, networks: [&str; 2], nodes: &[usize]) {
        for ((family, network), index) in FAMILIES.iter().zip(networks).zip([0, 1]) {
            let hops: Vec<_> =
                nodes.iter().map(|it| self.nodes[*it].addresses()[index].to_string()).collect();
            let mut words = vec![*family, "route", "replace", network];
            for hop in &hops {
                words.extend(["nexthop", "via", hop]);
            }
            // IPv6 replaces only the first next hop of several.
            let _ = self.router.ip(&[family, "route", "del", network]);
            self.router.ip(&words).expect("the router takes the route");
        }
    }
}

fn add_addresses(host: &NetNs, interface: &str, addresses: [IpAddr; 2]) -> Result<()> {
    let mut lengths = addresses.iter().zip([24, 64]);
    lengths.try_for_each(|(it, length)| host.add_interface_address(&format!("{it}/{length}"), interface))
}

fn route(host: &NetNs, networks: [&str; 2], via: [IpAddr; 2]) -> Result<()> {
    let mut routes = FAMILIES.iter().zip(networks).zip(via);
    routes.try_for_each(|((family, network), via)| {
        host.ip(&[family, "route", "add", network, "via", &via.to_string()])
    })
}

fn forward(host: &NetNs) -> Result<()> {
    host.set_sysctl("ipv4/ip_forward", "1")?;
    host.set_sysctl("ipv6/conf/all/forwarding", "1")
}
