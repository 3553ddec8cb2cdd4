//! All an end-to-end test needs at once: the test's process inside a sandbox and a network namespace of its own, where
//! every endpoint's address is local and no Service's address leads anywhere.
//! The one rule: what is not translated fails at once, so that nothing can pass by accident.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use aya::maps::{Array, Map, MapData};

pub use build_tools::build::Build;

use crate::{
    NetNs, Sandbox,
    agent::AgentCommand,
    manifest::{self, Service},
    netns::NetNsGuard,
    sandbox::CgroupGuard,
};

/// The node that tests serve.
pub const NODE: &str = "n1";

/// Where the agent's canary asks.
pub const CANARY: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(127, 107, 112, 101)),
    IpAddr::V6(Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0x6b, 0x7065)),
];

/// The test's own place.
#[derive(Debug)]
pub struct TestNode {
    _entered: NetNsGuard,
    _inside: CgroupGuard,
    netns: NetNs,
    sandbox: Sandbox,
}

impl TestNode {
    /// Enters a new one, or says why the test that wants it is skipped.
    ///
    /// # Panics
    ///
    /// If the machine has everything and it still fails.
    #[must_use]
    pub fn or_skip(name: &str) -> Option<Self> {
        let sandbox = Sandbox::or_skip(name)?;
        Some(Self::enter(sandbox).expect("the machine has everything a test needs"))
    }

    /// Enters a new one around a sandbox.
    ///
    /// # Errors
    ///
    /// If the kernel refuses, or `ip` is missing.
    pub fn enter(sandbox: Sandbox) -> Result<Self> {
        let netns = NetNs::new()?;
        // Whoever is asked for at these addresses is us.
        netns.ip(&["route", "add", "local", "10.244.0.0/16", "dev", "lo"])?;
        netns.ip(&["-6", "route", "add", "local", "fd00:10:244::/64", "dev", "lo"])?;
        fs::create_dir(sandbox.files().join("manifests"))?;
        let inside = sandbox.enter()?;
        let entered = netns.enter()?;
        Ok(Self { _entered: entered, _inside: inside, netns, sandbox })
    }

    /// Its sandbox.
    #[must_use]
    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// Its network namespace.
    #[must_use]
    pub fn netns(&self) -> &NetNs {
        &self.netns
    }

    /// The folder of manifests.
    #[must_use]
    pub fn manifests(&self) -> PathBuf {
        self.sandbox.files().join("manifests")
    }

    /// How to start the proxy here.
    #[must_use]
    pub fn command(&self, build: Build) -> AgentCommand {
        AgentCommand::run(&build.binary(), &self.sandbox, &self.manifests(), NODE)
    }

    /// Writes the Services, all of them in one moment.
    ///
    /// # Panics
    ///
    /// If the folder cannot be written to.
    pub fn write(&self, services: &[Service]) {
        let text: Vec<_> = services.iter().map(ToString::to_string).collect();
        manifest::write_atomically(&self.manifests().join("all.yaml"), &text.join("---\n"))
            .expect("manifests are written");
    }

    /// What `dump` prints of Services; whose the addresses of nodes are is left out.
    ///
    /// # Errors
    ///
    /// What it said if it failed.
    pub fn dump(&self, build: Build) -> Result<Vec<String>> {
        let Output { status, stdout, stderr } = Command::new(build.binary())
            .args(["dump", "--pin-dir"])
            .arg(self.sandbox.pins())
            .output()
            .context("dump")?;
        if !status.success() {
            bail!("dump failed: {}", String::from_utf8_lossy(&stderr));
        }
        let lines = String::from_utf8(stdout)?;
        Ok(lines.lines().filter(|it| !it.starts_with("node-address ")).map(ToOwned::to_owned).collect())
    }

    /// Where the program of a hook is pinned, of the newest layout of the maps.
    ///
    /// # Panics
    ///
    /// If the folder of pins cannot be read.
    #[must_use]
    pub fn program(&self, hook: &str) -> PathBuf {
        let newest = fs::read_dir(self.sandbox.pins())
            .expect("pins can be listed")
            .flatten()
            .filter_map(|it| it.file_name().to_str()?.strip_prefix('v')?.parse::<u32>().ok())
            .max();
        self.sandbox.pins().join(format!("v{}/programs/{hook}", newest.unwrap_or_default()))
    }

    /// Whether every program is in effect, and will be without its agent: the last one is that of connect6, and is pinned
    /// after its link. Until then somebody may be served, but a death takes what has no name yet with it.
    ///
    /// # Panics
    ///
    /// If the folder of pins cannot be read.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.program("connect6").exists()
    }

    /// How many socket slots somebody has, but for the agent's canary, which has one for a moment.
    ///
    /// # Panics
    ///
    /// If there are none.
    #[must_use]
    pub fn used_socket_slots(&self) -> usize {
        let slots = MapData::from_pin(self.sandbox.pins().join("sock_nat1/slots"));
        let slots = slots.and_then(Map::from_map_data).expect("slots are pinned");
        // The claims are the first of eight words, and two are the address of the Service.
        let slots: Array<MapData, [u64; 8]> = Array::try_from(slots).expect("slots have eight words");
        let is_canary = |slot: &[u64; 8]| {
            let mut ip = [0; 16];
            ip[..8].copy_from_slice(&slot[2].to_ne_bytes());
            ip[8..].copy_from_slice(&slot[3].to_ne_bytes());
            CANARY.contains(&Ipv6Addr::from(ip).to_canonical())
        };
        slots.iter().flatten().filter(|it| it[0] != 0 && !is_canary(it)).count()
    }

    /// Every pin, below the folder of pins.
    ///
    /// # Panics
    ///
    /// If the folder cannot be read.
    #[must_use]
    pub fn pins(&self) -> Vec<String> {
        let mut pins = Vec::new();
        walk(self.sandbox.pins(), &mut pins);
        let top = self.sandbox.pins().to_string_lossy();
        pins.iter().map(|it| it.to_string_lossy().trim_start_matches(&*top).to_owned()).collect()
    }
}

fn walk(folder: &Path, pins: &mut Vec<PathBuf>) {
    let mut entries: Vec<_> =
        fs::read_dir(folder).expect("pins can be listed").flatten().map(|it| it.path()).collect();
    entries.sort_unstable();
    for entry in entries {
        if entry.is_dir() { walk(&entry, pins) } else { pins.push(entry) }
    }
}

/// What `dump` prints when exactly these Services are in force.
#[must_use]
pub fn expected_dump(services: &[Service]) -> Vec<String> {
    let mut lines = Vec::new();
    for service in services {
        let Service { cluster_ips, load_balancer_ips, external_ips, ports, .. } = service;
        let at = |ip: &IpAddr, port| std::net::SocketAddr::new(*ip, port);
        let ips = cluster_ips.iter().chain(load_balancer_ips).chain(external_ips);
        let at_ips = ips.flat_map(|ip| ports.iter().map(move |it| (*ip, it.port, it)));
        // A node port is one row for each family.
        let at_nodes = cluster_ips.iter().flat_map(|ip| {
            let any: IpAddr =
                if ip.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
            ports.iter().filter_map(move |it| Some((any, it.node_port?, it)))
        });
        for (ip, number, port) in at_ips.chain(at_nodes) {
            let frontend = format!("{}/{}", at(&ip, number), port.protocol);
            let affinity = service.affinity.map(|it| format!(" affinity={it}s")).unwrap_or_default();
            let endpoints = service.endpoints.iter().filter(|it| it.ready).flat_map(|it| &it.addresses);
            let backends: Vec<_> =
                endpoints.filter(|it| it.is_ipv4() == ip.is_ipv4()).map(|it| at(it, port.target)).collect();
            lines.push(format!("frontend {frontend} backends={}{affinity}", backends.len()));
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

/// How many maps, programs and links the kernel holds that bear one of our names: what is counted to find a leak.
///
/// # Panics
///
/// If the kernel cannot be asked.
#[must_use]
pub fn kernel_objects() -> BTreeMap<&'static str, usize> {
    let ours = |name: &str| {
        let name = name.to_lowercase();
        [
            "frontends",
            "node_ports",
            "node_addrs",
            "backends",
            "members",
            "active",
            "grace",
            "sk_nat",
            "udp_sk_nat",
            "slots",
            "affinity",
            "slot_overflows",
            "udp_nat",
            "excluded",
        ]
        .iter()
        .any(|it| name.starts_with(it))
    };
    let hook = |name: &str| {
        ["connect", "sendmsg", "recvmsg", "getpeername", "bind"]
            .iter()
            .any(|it| name.strip_prefix(it).is_some_and(|it| it == "4" || it == "6"))
    };
    let maps = aya::maps::loaded_maps()
        .filter(|it| it.as_ref().is_ok_and(|it| it.name_as_str().is_some_and(ours)))
        .count();
    let programs = aya::programs::loaded_programs()
        .filter(|it| it.as_ref().is_ok_and(|it| it.name_as_str().is_some_and(hook)))
        .count();
    let links = aya::programs::loaded_links().filter(Result::is_ok).count();
    BTreeMap::from([("maps", maps), ("programs", programs), ("links", links)])
}

/// The same once the kernel has freed what was given up: it does so a while later, on its own, and one after the other.
///
/// # Panics
///
/// If the kernel cannot be asked.
#[must_use]
pub fn settled_kernel_objects() -> BTreeMap<&'static str, usize> {
    let mut last = kernel_objects();
    let mut equal = 0;
    for _ in 0..100 {
        thread::sleep(Duration::from_millis(100));
        let now = kernel_objects();
        equal = if now == last { equal + 1 } else { 0 };
        last = now;
        if equal == 5 {
            break;
        }
    }
    last
}
