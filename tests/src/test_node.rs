//! What most end-to-end tests need: the test's process in a sandbox and in a network namespace of its own, where the
//! endpoints' addresses are local and a Service's address has no route, and a proxy.
//!
//! Untranslated connects fail at once, so that no test passes by accident.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::Command,
};

use anyhow::{Result, bail};
use aya::maps::{Array, Map, MapData};
use build_tools::files_below;

use crate::{
    Agent, AgentCommand, Build, EchoServer, NetNs, Sandbox, TIMEOUT, agent,
    fixtures::{TARGET_PORT, endpoint},
    http,
    manifest::{self, Service},
    netns::NetNsGuard,
    sandbox::CgroupGuard,
};

pub const NODE: &str = "n1";

/// The addresses that the agent's probe connects to.
pub const PROBE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(127, 107, 112, 101)),
    IpAddr::V6(Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0x6b, 0x7065)),
];

/// A node under test. Dropping it stops the servers, kills the proxy, leaves namespace and cgroup, and removes the sandbox.
#[derive(Debug)]
pub struct TestNode {
    servers: Vec<EchoServer>,
    agent: Option<Agent>,
    _netns_guard: NetNsGuard,
    _cgroup_guard: CgroupGuard,
    netns: NetNs,
    sandbox: Sandbox,
}

impl TestNode {
    pub fn or_skip() -> Option<Self> {
        let sandbox = Sandbox::or_skip()?;
        Some(Self::enter(sandbox).expect("the machine has everything a test needs"))
    }

    /// Enters a new node with echo servers at these endpoints.
    pub fn serving_or_skip(endpoints: impl IntoIterator<Item = u8>) -> Option<Self> {
        let mut node = Self::or_skip()?;
        node.serve(endpoints);
        Some(node)
    }

    /// Enters a new node with echo servers at these endpoints and manifests of these Services.
    pub fn prepared_or_skip(endpoints: impl IntoIterator<Item = u8>, services: &[Service]) -> Option<Self> {
        let node = Self::serving_or_skip(endpoints)?;
        node.write(services);
        Some(node)
    }

    /// Enters a new node with echo servers, manifests and a running proxy.
    #[track_caller]
    pub fn running_or_skip(
        endpoints: impl IntoIterator<Item = u8>,
        services: &[Service],
        arguments: &[&str],
    ) -> Option<Self> {
        let mut node = Self::prepared_or_skip(endpoints, services)?;
        node.start(arguments);
        Some(node)
    }

    pub fn enter(sandbox: Sandbox) -> Result<Self> {
        let netns = NetNs::with_local_endpoints()?;
        netns.ip(&["-6", "route", "add", "local", "fd00:10:244::/64", "dev", "lo"])?;
        fs::create_dir(sandbox.files().join("manifests"))?;
        let _cgroup_guard = sandbox.enter()?;
        let _netns_guard = netns.enter()?;
        Ok(Self { servers: Vec::new(), agent: None, _netns_guard, _cgroup_guard, netns, sandbox })
    }

    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    pub fn netns(&self) -> &NetNs {
        &self.netns
    }

    pub fn manifests(&self) -> PathBuf {
        self.sandbox.files().join("manifests")
    }

    /// The folder of manifests as a value of `--source`.
    pub fn source(&self) -> String {
        format!("file:{}", self.manifests().display())
    }

    /// Starts echo servers `web-N` at both addresses of the endpoints N.
    pub fn serve(&mut self, endpoints: impl IntoIterator<Item = u8>) {
        for n in endpoints {
            for ip in endpoint(n) {
                if ip.is_ipv6() {
                    self.netns.add_address(ip).expect("the address is free");
                }
                let server = EchoServer::start(&format!("web-{n}"), SocketAddr::new(ip, TARGET_PORT));
                self.servers.push(server.expect("the address is local"));
            }
        }
    }

    /// Writes the Services to one file, atomically.
    pub fn write(&self, services: &[Service]) {
        self.write_file("all.yaml", &services.iter().map(ToString::to_string).collect::<String>());
    }

    /// Writes another file of manifests, atomically.
    pub fn write_file(&self, name: &str, text: &str) {
        manifest::write_atomically(&self.manifests().join(name), text)
            .expect("the folder of manifests is writable");
    }

    pub fn command(&self, build: Build) -> AgentCommand {
        AgentCommand::run(&build.binary(), &self.sandbox, &self.manifests(), NODE)
    }

    /// Starts a brain alone, and does not wait.
    #[must_use]
    #[track_caller]
    pub fn start_brain(&self) -> Agent {
        let command = AgentCommand::brain(&Build::Product.binary(), &self.sandbox, &self.manifests(), NODE);
        command.start(&self.sandbox).expect("the binary starts")
    }

    /// Starts an agent of the brain, and does not wait.
    #[must_use]
    #[track_caller]
    pub fn start_agent(&self) -> Agent {
        let command = AgentCommand::agent(&Build::Product.binary(), &self.sandbox, NODE);
        command.start(&self.sandbox).expect("the binary starts")
    }

    /// Starts the proxy with more arguments and waits until a generation is active and the status pages are served.
    #[track_caller]
    pub fn start(&mut self, arguments: &[&str]) {
        self.start_with(&self.command(Build::Product).args(arguments));
    }

    #[track_caller]
    pub fn start_with(&mut self, command: &AgentCommand) {
        self.start_inactive(command);
        self.agent_mut().wait_until_applied(TIMEOUT).expect("the proxy becomes active");
        let socket = agent::status_socket(&self.sandbox);
        let is_served = || UnixStream::connect(&socket).is_ok();
        self.agent_mut().wait_until(TIMEOUT, is_served).expect("the status pages are served");
    }

    /// Starts the proxy and does not wait.
    #[track_caller]
    pub fn start_inactive(&mut self, command: &AgentCommand) {
        // Another one still runs only if the test wants to see that.
        self.agent = Some(command.start(&self.sandbox).expect("the binary starts"));
    }

    #[track_caller]
    pub fn agent(&self) -> &Agent {
        self.agent.as_ref().expect("a proxy runs")
    }

    #[track_caller]
    pub fn agent_mut(&mut self) -> &mut Agent {
        self.agent.as_mut().expect("a proxy runs")
    }

    #[track_caller]
    pub fn kill(&mut self) {
        self.agent.take().expect("a proxy runs").kill9().expect("it runs until it is killed");
    }

    /// Terminates the proxy, which must exit with 0.
    #[track_caller]
    pub fn terminate(&mut self) {
        let status = self.agent.take().expect("a proxy runs").terminate().expect("it ends");
        assert!(status.success(), "the proxy ended with {status}");
    }

    #[track_caller]
    pub fn log(&self) -> String {
        self.agent().log()
    }

    /// Waits until a condition holds, while the proxy runs.
    #[track_caller]
    pub fn wait_until(&mut self, mut condition: impl FnMut(&Self) -> bool) {
        let mut agent = self.agent.take().expect("a proxy runs");
        let result = agent.wait_until(TIMEOUT, || condition(self));
        self.agent = Some(agent);
        result.unwrap_or_else(|error| panic!("{error:#}"));
    }

    #[track_caller]
    pub fn wait_until_logged(&mut self, texts: &[&str]) {
        let result = self.agent_mut().wait_for_log(TIMEOUT, |log| texts.iter().all(|it| log.contains(it)));
        result.unwrap_or_else(|error| panic!("not all of {texts:?} were logged: {error:#}"));
    }

    #[track_caller]
    pub fn wait_until_ready(&mut self) {
        self.wait_until(|_| http::is_ready());
    }

    /// Writes the Services and waits until exactly these are active.
    #[track_caller]
    pub fn apply(&mut self, services: &[Service]) {
        self.write(services);
        self.wait_until_active(services);
    }

    /// Waits until exactly these Services are active.
    #[track_caller]
    pub fn wait_until_active(&mut self, services: &[Service]) {
        let expected = expected_dump(services);
        self.wait_until(|node| node.dump(Build::Product).is_ok_and(|it| it == expected));
    }

    /// A subcommand of the binary that finds the proxy, and its cgroup.
    pub fn cli(&self, subcommand: &str) -> Command {
        self.cli_of(Build::Product, subcommand)
    }

    pub fn cli_of(&self, build: Build, subcommand: &str) -> Command {
        let mut command = agent::cli(&build.binary(), &self.sandbox, subcommand);
        command.env("KUBE_PROXY_EBPF_CGROUP", self.sandbox.cgroup());
        command
    }

    /// A status page of the proxy; fails if nothing listens at its socket.
    pub fn status_page(&self, path: &str) -> io::Result<http::Response> {
        http::get_from_socket(&agent::status_socket(&self.sandbox), path)
    }

    /// What `dump` prints about Services, without the node's addresses; its standard error if it fails.
    pub fn dump(&self, build: Build) -> Result<Vec<String>> {
        let output = agent::run(&mut self.cli_of(build, "dump"));
        if output.code != Some(0) {
            bail!("dump failed: {}", output.stderr);
        }
        let lines = output.stdout.lines().filter(|it| !it.starts_with("node-address "));
        Ok(lines.map(ToOwned::to_owned).collect())
    }

    /// The pin of the program of a hook, in the folder of the newest map layout.
    pub fn program(&self, hook: &str) -> PathBuf {
        let newest = self.layouts().into_iter().filter_map(|it| it[1..].parse::<u32>().ok()).max();
        self.sandbox.pins().join(format!("v{}/programs/{hook}", newest.unwrap_or_default()))
    }

    /// The folders of map layouts, such as `v5`, sorted.
    pub fn layouts(&self) -> Vec<String> {
        let pins = fs::read_dir(self.sandbox.pins()).expect("pins can be listed").flatten();
        let names = pins.map(|it| it.file_name().to_string_lossy().into_owned());
        let mut layouts: Vec<_> = names.filter(|it| it.starts_with('v')).collect();
        layouts.sort();
        layouts
    }

    /// Whether every program is attached and pinned: that of connect6 is the last one, and is pinned after its link.
    /// Before, connects may be translated already, but a crash detaches what is not pinned.
    pub fn is_attached(&self) -> bool {
        self.program("connect6").exists()
    }

    /// A pinned map, given by its path below the pin folder.
    #[track_caller]
    pub fn map(&self, path: &str) -> Map {
        let map = MapData::from_pin(self.sandbox.pins().join(path));
        map.and_then(Map::from_map_data).expect("the map is pinned")
    }

    /// How many socket slots are in use, except by the agent's probe, which uses one briefly.
    pub fn used_socket_slots(&self) -> usize {
        // The first of sixteen half words says whether a slot is owned; words three and four are the Service's address.
        let slots: Array<MapData, [u64; 8]> =
            Array::try_from(self.map("sock_nat4/slots")).expect("slots have eight words");
        let is_probe = |slot: &[u64; 8]| {
            let mut ip = [0; 16];
            ip[..8].copy_from_slice(&slot[2].to_ne_bytes());
            ip[8..].copy_from_slice(&slot[3].to_ne_bytes());
            PROBE.contains(&Ipv6Addr::from(ip).to_canonical())
        };
        slots.iter().flatten().filter(|it| it[0] as u32 != 0 && !is_probe(it)).count()
    }

    /// What the programs keep of failing endpoints: 1 if there is a record, how often an endpoint was ejected because it did
    /// not answer, how often because it refused, and a zero.
    pub fn health_words(&self) -> [u64; 4] {
        let words: Array<MapData, u64> = Array::try_from(self.map("health2/health")).expect("they are words");
        [0, 1, 2, 3].map(|it| words.get(&it, 0).expect("there are four"))
    }

    /// Every pin, as its path below the pin folder, sorted.
    pub fn pins(&self) -> Vec<String> {
        let top = self.sandbox.pins().to_string_lossy();
        let pins = files_below(self.sandbox.pins()).unwrap_or_default();
        pins.iter().map(|it| it.to_string_lossy().trim_start_matches(&*top).to_owned()).collect()
    }
}

/// A pod: a network namespace in which the IPv4 addresses of all endpoints are local, with the servers `web-N` at some.
pub fn pod_with_servers(endpoints: impl IntoIterator<Item = u8>) -> (NetNs, Vec<EchoServer>) {
    let netns = NetNs::with_local_endpoints().expect("the kernel has network namespaces");
    let start = |n: u8| EchoServer::start(&format!("web-{n}"), (endpoint(n)[0], TARGET_PORT).into());
    let start = |n| start(n).expect("the address is local");
    let servers = netns.run(|| endpoints.into_iter().map(start).collect());
    (netns, servers)
}

/// What `dump` prints when exactly these Services are active.
pub fn expected_dump(services: &[Service]) -> Vec<String> {
    // A node port has one row per family.
    let any = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    let mut lines = Vec::new();
    for service in services {
        let affinity = service.affinity.map(|it| format!(" affinity={it}s")).unwrap_or_default();
        let mut balancing = String::new();
        if let Some(algorithm) = service.annotations.get("kube-proxy-ebpf.io/load-balancing") {
            balancing += &format!(" {algorithm}");
        }
        if let Some(time) = service.annotations.get("kube-proxy-ebpf.io/slow-start") {
            balancing += &format!(" slow-start={time}");
        }
        for (address, port) in service.frontends(any) {
            let frontend = format!("{address}/{}", port.protocol);
            let backends = service.ready_endpoints(address.ip()).map(|it| SocketAddr::new(it, port.target));
            let backends: Vec<_> = backends.collect();
            lines.push(format!("frontend {frontend} backends={}{affinity}{balancing}", backends.len()));
            for backend in backends {
                lines.push(format!("backend {frontend} -> {backend}"));
                if port.protocol == "UDP" || service.affinity.is_some() {
                    lines.push(format!("member {frontend} {backend}"));
                }
            }
        }
    }
    lines.sort_unstable();
    lines
}
