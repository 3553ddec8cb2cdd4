//! A cluster behind a router: nodes with a proxy and pods each, and two clients whose connections the router spreads over the
//! nodes that are its next hops.
//!
//! ```text
//!   client 198.18.0.100 ──┬ router ─┬── n1 192.168.50.1 ── p1 10.244.1.10
//!   client 198.18.1.100 ──┘         ├── n2 192.168.50.2 ── p2 10.244.2.10
//!                                   └── …
//! ```
//! The pods of a node share a network namespace, in which each has addresses of its own.
//! IPv6 has the same numbers. The router hashes addresses and ports, so that another set of next hops moves connections.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU16, Ordering},
};

use anyhow::Result;

use crate::{
    Agent, AgentCommand, Build, EchoServer, NetNs, Sandbox, TIMEOUT, agent, eventually,
    manifest::{self, Service},
    requirements::kernel_at_least,
    sandbox::name_or_skip,
    skip::skip,
    test_cluster::{
        FAMILIES, TARGET, add_addresses, addresses, forward, join, new_lan, new_netns, node_manifest, pod,
        route,
    },
};

/// The addresses of each client.
pub const OUTSIDE_CLIENTS: [[IpAddr; 2]; 2] = [client_network(0, 100), client_network(1, 100)];
/// The router's addresses for the nodes.
const GATEWAY: [IpAddr; 2] = addresses([192, 168, 50, 254], [0xfd00, 0x50, 0, 0, 0, 0, 0, 0xfe]);
/// The address of a Service without endpoints; its port is the number of the last write.
const LAST: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 96, 255, 255));
/// The number of a node's first pod.
const FIRST_POD: u8 = 10;

/// An address in the network of a client; the first one is the router's.
const fn client_network(client: u8, host: u8) -> [IpAddr; 2] {
    addresses([198, 18, client, host], [0x2001, 0x2, 0, client as u16, 0, 0, 0, host as u16])
}

#[derive(Debug)]
pub struct IngressCluster {
    pub clients: [NetNs; 2],
    /// The router; its interfaces are `router`, and `client0` and so on.
    pub router: NetNs,
    /// The bridge of the router and the nodes; its ports are named after them.
    pub lan: NetNs,
    /// The nodes, from number 1.
    pub nodes: Vec<IngressNode>,
    manifests: Sandbox,
    writes: AtomicU16,
}

#[derive(Debug)]
pub struct IngressNode {
    number: u8,
    pub netns: NetNs,
    pub pods: NetNs,
    /// One server per family for each pod.
    servers: Vec<[EchoServer; 2]>,
    /// Its proxy, while it runs; dropped before the sandbox, which has its log.
    pub agent: Option<Agent>,
    pub sandbox: Sandbox,
    binary: PathBuf,
}

impl IngressNode {
    /// The name of the node and of its pods' servers, which reply with the source address of the client.
    pub fn name(&self) -> String {
        format!("n{}", self.number)
    }

    pub fn addresses(&self) -> [IpAddr; 2] {
        node_addresses(self.number)
    }

    /// The addresses of its first pod.
    pub fn pod_addresses(&self) -> [IpAddr; 2] {
        pod_addresses(self.number, 0)
    }

    /// The addresses of its first pods; those that do not run yet start.
    pub fn run_pods(&mut self, count: u8) -> Vec<[IpAddr; 2]> {
        for pod in self.servers.len() as u8..count {
            self.add_pod(pod).expect("pods can be added");
        }
        (0..count).map(|it| pod_addresses(self.number, it)).collect()
    }

    fn add_pod(&mut self, pod: u8) -> Result<()> {
        let addresses = pod_addresses(self.number, pod);
        if pod > 0 {
            for ((family, address), length) in FAMILIES.iter().zip(addresses).zip([32, 128]) {
                let address = format!("{address}/{length}");
                self.pods.add_interface_address(&address, "eth0")?;
                self.netns.ip(&[family, "route", "add", &address, "dev", POD_INTERFACE])?;
            }
        }
        let _inside = self.pods.enter()?;
        let name = self.name();
        let serve = |address| EchoServer::start_showing_source(&name, SocketAddr::new(address, TARGET));
        self.servers.push([serve(addresses[0])?, serve(addresses[1])?]);
        Ok(())
    }

    /// The pinned links of its proxy whose names begin with a text.
    pub fn links(&self, prefix: &str) -> Vec<PathBuf> {
        let links = fs::read_dir(self.sandbox.pins().join("links")).expect("the proxy has pinned links");
        let mut links: Vec<_> = links.flatten().map(|it| it.path()).collect();
        links.retain(|it| it.file_name().is_some_and(|it| it.to_string_lossy().starts_with(prefix)));
        links
    }

    /// A subcommand of its binary that finds its proxy.
    pub fn cli(&self, subcommand: &str) -> Command {
        agent::cli(&self.binary, &self.sandbox, subcommand)
    }

    /// The lines of `dump` that begin with a text; none while its tables change.
    fn dump(&self, prefix: &str) -> Vec<String> {
        let dump = agent::run(&mut self.cli("dump"));
        dump.stdout.lines().filter(|it| it.starts_with(prefix)).map(ToOwned::to_owned).collect()
    }
}

/// The interface of a node toward its pods.
const POD_INTERFACE: &str = "pod";

fn node_addresses(number: u8) -> [IpAddr; 2] {
    addresses([192, 168, 50, number], [0xfd00, 0x50, 0, 0, 0, 0, 0, number.into()])
}

fn pod_addresses(number: u8, pod: u8) -> [IpAddr; 2] {
    let pod = FIRST_POD + pod;
    addresses([10, 244, number, pod], [0xfd00, 0x244, number.into(), 0, 0, 0, 0, pod.into()])
}

impl IngressCluster {
    /// Makes a cluster of so many nodes. No proxy runs, and the router has no next hop.
    pub fn or_skip(nodes: u8) -> Option<Self> {
        let name = name_or_skip()?;
        if !kernel_at_least(5, 12) {
            skip("forwarding needs Linux 5.12");
            return None;
        }
        Some(Self::new(&name, nodes).expect("the machine has everything a test needs"))
    }

    /// Makes a cluster as [`Self::or_skip`] does, with a name of its own; fails if the machine lacks something.
    pub fn new(name: &str, nodes: u8) -> Result<Self> {
        let (lan, router, clients) = (new_lan()?, new_netns()?, [new_netns()?, new_netns()?]);
        join(&lan, "router", &router, GATEWAY)?;
        for (number, client) in (0..).zip(&clients) {
            let interface = format!("client{number}");
            router.connect_veth(&interface, client, "eth0")?;
            add_addresses(&router, &interface, client_network(number, 1))?;
            add_addresses(client, "eth0", OUTSIDE_CLIENTS[usize::from(number)])?;
            route(client, ["default"; 2], client_network(number, 1))?;
        }
        forward(&router)?;
        for version in ["ipv4", "ipv6"] {
            router.set_sysctl(&format!("{version}/fib_multipath_hash_policy"), "1")?;
        }
        let mut made = Vec::new();
        for number in 1..=nodes {
            let netns = new_netns()?;
            join(&lan, &format!("n{number}"), &netns, node_addresses(number))?;
            forward(&netns)?;
            route(&netns, ["default"; 2], GATEWAY)?;
            for other in (1..=nodes).filter(|it| *it != number) {
                let networks = [format!("10.244.{other}.0/24"), format!("fd00:244:{other:x}::/64")];
                route(&netns, [&networks[0], &networks[1]], node_addresses(other))?;
            }
            let pods = pod(&netns, POD_INTERFACE, pod_addresses(number, 0))?;
            let sandbox = Sandbox::new(&format!("{name}-n{number}"))?;
            let (servers, agent, binary) = (Vec::new(), None, PathBuf::new());
            let mut node = IngressNode { number, netns, pods, servers, sandbox, agent, binary };
            node.add_pod(0)?;
            made.push(node);
        }
        let manifests = Sandbox::new(name)?;
        fs::create_dir(manifests.files().join("manifests"))?;
        Ok(Self { clients, router, lan, nodes: made, manifests, writes: AtomicU16::new(0) })
    }

    /// The folder of manifests, which all proxies read.
    pub fn manifests(&self) -> PathBuf {
        self.manifests.files().join("manifests")
    }

    /// Writes the Services and the Nodes to one file, atomically.
    pub fn write(&self, services: &[Service]) {
        // Shows in a dump which text has been read.
        let port = self.writes.fetch_add(1, Ordering::Relaxed) + 1;
        let last = Service::new("last", &[LAST]).port("", "TCP", port, TARGET);
        let mut text: String = services.iter().chain([&last]).map(ToString::to_string).collect();
        for node in &self.nodes {
            text += &node_manifest(node.number, &node.addresses());
        }
        manifest::write_atomically(&self.manifests().join("all.yaml"), &text)
            .expect("the folder of manifests is writable");
    }

    #[track_caller]
    pub fn agent(&mut self, node: usize) -> &mut Agent {
        self.nodes[node].agent.as_mut().expect("a proxy runs")
    }

    #[track_caller]
    pub fn kill(&mut self, node: usize) {
        self.nodes[node].agent.take().expect("a proxy runs").kill9().expect("it runs until it is killed");
    }

    pub fn start_all(&mut self) {
        (0..self.nodes.len()).for_each(|it| self.start(it, &[]));
    }

    /// Starts the proxy of a node, with more arguments, after one that may have been killed.
    pub fn start(&mut self, node: usize, arguments: &[&str]) {
        self.start_binary(&Build::Product.binary(), node, arguments);
    }

    pub fn start_binary(&mut self, binary: &Path, node: usize, arguments: &[&str]) {
        self.start_with(binary, node, |it| it.args(arguments.iter().copied()));
    }

    pub fn start_with(
        &mut self,
        binary: &Path,
        node: usize,
        change: impl FnOnce(AgentCommand) -> AgentCommand,
    ) {
        let manifests = self.manifests();
        let node = &mut self.nodes[node];
        let command = AgentCommand::run(binary, &node.sandbox, &manifests, &node.name());
        let command = change(command.args(["--backend=ebpf", "--packets=nft"]));
        node.agent = Some(node.netns.run(|| command.start(&node.sandbox).expect("the proxy starts")));
        binary.clone_into(&mut node.binary);
    }

    /// Pulls a node's cable out, or puts it in.
    pub fn plug(&self, node: usize, is_in: bool) {
        let state = if is_in { "up" } else { "down" };
        self.lan.ip(&["link", "set", &self.nodes[node].name(), state]).expect("the cable is there");
    }

    pub fn cleanup(&self, node: usize) {
        let node = &self.nodes[node];
        node.netns.run(|| agent::run(&mut node.cli("cleanup"))).success();
    }

    fn running(&self) -> impl Iterator<Item = &IngressNode> {
        self.nodes.iter().filter(|it| it.agent.is_some())
    }

    /// Waits until the tables of every node whose proxy runs say what was written last.
    #[track_caller]
    pub fn wait_until_applied(&self) {
        let frontend =
            format!("frontend {}/TCP ", SocketAddr::new(LAST, self.writes.load(Ordering::Relaxed)));
        for node in self.running() {
            let is_applied = eventually(TIMEOUT, || !node.dump(&frontend).is_empty());
            assert!(is_applied, "{} has no {frontend}: {:#?}", node.name(), node.dump("frontend "));
        }
    }

    /// Waits until every node whose proxy runs forwards a frontend to nodes, given by index, in proportion to their endpoints.
    #[track_caller]
    pub fn wait_until_forwarded(&self, frontend: SocketAddr, nodes: &[(usize, u32)]) {
        let endpoints: u32 = nodes.iter().map(|it| it.1).sum();
        let family = usize::from(frontend.is_ipv6());
        let prefix = format!("forward {frontend}/TCP -> ");
        // The address, and the share of the rows, which is not exact.
        let is_wanted = |line: &String| {
            // No node owns rows while packets are translated.
            let Some((address, rows)) = line[prefix.len()..].split_once(" rows=") else { return false };
            let (rows, all) = rows.split_once('/').expect("a line has the number of all rows");
            let (all, stage) = all.split_once(' ').unwrap_or((all, ""));
            let [rows, all] = [rows, all].map(|it| it.parse::<f64>().expect("numbers"));
            if stage == "established-only" {
                return false;
            }
            nodes.iter().any(|(node, share)| {
                let of_rows = rows / all * f64::from(endpoints) / f64::from(*share);
                self.nodes[*node].addresses()[family].to_string() == address
                    && (0.95..1.05).contains(&of_rows)
            })
        };
        for node in self.running() {
            let mut forwards = Vec::new();
            let is_forwarded = eventually(TIMEOUT, || {
                forwards = node.dump(&prefix);
                forwards.len() == nodes.len() && forwards.iter().all(is_wanted)
            });
            assert!(is_forwarded, "{} does not forward {frontend} to {nodes:?}: {forwards:#?}", node.name());
        }
    }

    /// Waits until no node whose proxy runs looks for connections that it has translated before packets are forwarded.
    #[track_caller]
    pub fn wait_until_settled(&self) {
        for node in self.running() {
            let mut forwards = Vec::new();
            let is_settled = eventually(TIMEOUT, || {
                forwards = node.dump("forward ");
                !forwards.iter().any(|it| it.ends_with(" known-first"))
            });
            // Where the kernel lists them as text.
            let tracked = node.netns.run(|| fs::read_to_string("/proc/thread-self/net/nf_conntrack"));
            let tracked = tracked.unwrap_or_default();
            assert!(is_settled, "{} may still know connections: {forwards:#?}\n{tracked}", node.name());
        }
    }

    /// Replaces the next hops of a network of each family by these nodes, given by index, without a gap.
    pub fn set_next_hops(&self, networks: [&str; 2], nodes: &[usize]) {
        for ((family, network), index) in FAMILIES.iter().zip(networks).zip([0, 1]) {
            let hops: Vec<_> =
                nodes.iter().map(|it| self.nodes[*it].addresses()[index].to_string()).collect();
            let mut words = vec![*family, "route", "replace", network];
            for hop in &hops {
                words.extend(["nexthop", "via", hop]);
            }
            self.router.ip(&words).expect("the router takes the route");
        }
    }
}
