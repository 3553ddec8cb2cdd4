//! Two network namespaces, joined by a veth pair: one of the client, one of the pods.

use std::{fs, path::Path, process};

use anyhow::Result;
use tests::{
    NetNs,
    netns::{NetNsGuard, ip},
};

const PREFIX: &str = "kpe-";
const ROLES: [&str; 2] = ["client", "pods"];
/// The client's own addresses, in the networks of the pods.
const CLIENT: [&str; 2] = ["10.244.0.1/16", "fd00:10:244::1/64"];

pub(crate) struct Topology {
    client: NamedNetNs,
    pods: NamedNetNs,
}

/// A namespace that `ip netns` lists; removed when dropped.
struct NamedNetNs {
    name: String,
    namespace: Option<NetNs>,
    is_left: bool,
}

impl Topology {
    pub(crate) fn new() -> Result<Self> {
        let [client, pods] = ROLES.map(NamedNetNs::new);
        let topology = Self { client: client?, pods: pods? };
        let (client, pods) = (&*topology.client.name, &*topology.pods.name);
        ip(&["-n", client, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", pods])?;
        for name in [client, pods] {
            ip(&["-n", name, "link", "set", "lo", "up"])?;
            ip(&["-n", name, "link", "set", "eth0", "up"])?;
        }
        for address in CLIENT {
            add_address(client, address)?;
        }
        Ok(topology)
    }

    /// Adds an address to the pods' namespace, in the client's network.
    pub(crate) fn add_pod_address(&self, address: std::net::IpAddr) -> Result<()> {
        add_address(&self.pods.name, &format!("{address}/{}", if address.is_ipv4() { 16 } else { 64 }))
    }

    /// Moves the calling thread into the client's namespace until the guard is dropped.
    pub(crate) fn client(&self) -> Result<NetNsGuard> {
        self.client.enter()
    }

    /// Moves the calling thread into the pods' namespace until the guard is dropped.
    pub(crate) fn pods(&self) -> Result<NetNsGuard> {
        self.pods.enter()
    }

    pub(crate) fn client_name(&self) -> &str {
        &self.client.name
    }

    /// Leaves the namespaces when dropped.
    pub(crate) fn leave(&mut self) {
        self.client.is_left = true;
        self.pods.is_left = true;
    }
}

fn add_address(namespace: &str, address: &str) -> Result<()> {
    let mut words = vec!["-n", namespace, "address", "add", address, "dev", "eth0"];
    if address.contains(':') {
        // Usable at once, without duplicate address detection.
        words.push("nodad");
    }
    ip(&words)
}

impl NamedNetNs {
    fn new(role: &str) -> Result<Self> {
        let name = format!("{PREFIX}{role}-{}", process::id());
        ip(&["netns", "add", &name])?;
        let mut named = Self { name, namespace: None, is_left: false };
        named.namespace = Some(NetNs::open(&Path::new("/run/netns").join(&named.name))?);
        Ok(named)
    }

    fn enter(&self) -> Result<NetNsGuard> {
        self.namespace.as_ref().expect("new() has opened it").enter()
    }
}

impl Drop for NamedNetNs {
    fn drop(&mut self) {
        if self.is_left {
            return;
        }
        if let Err(error) = ip(&["netns", "delete", &self.name]) {
            eprintln!("warning: cannot remove a network namespace: {error:#}");
        }
    }
}

/// Removes the namespaces of demos that have ended; their processes have been killed with their sandboxes.
pub(crate) fn remove_stale() {
    for entry in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name.strip_prefix(PREFIX).and_then(|it| it.rsplit_once('-'));
        let Some((_, owner)) = owner.filter(|(role, _)| ROLES.contains(role)) else { continue };
        if !Path::new("/proc").join(owner).exists() {
            drop(NamedNetNs { name, namespace: None, is_left: false });
        }
    }
}
