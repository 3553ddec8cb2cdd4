//! Two network namespaces, joined by a veth pair: where the client is, and where the pods are.

use std::{fs, path::Path, process};

use anyhow::Result;
use tests::{
    NetNs,
    netns::{NetNsGuard, ip},
};

const PREFIX: &str = "kpe-";
/// The client's own addresses; those of the pods are of the same networks.
const CLIENT: [&str; 2] = ["10.244.0.1/16", "fd00:10:244::1/64"];

pub(crate) struct Topology {
    client: Named,
    pods: Named,
}

/// A namespace that `ip netns` knows; removed when dropped.
struct Named {
    name: String,
    namespace: Option<NetNs>,
    left: bool,
}

impl Topology {
    pub(crate) fn new() -> Result<Self> {
        let (client, pods) = (Named::new("client")?, Named::new("pods")?);
        let topology = Self { client, pods };
        let (client, pods) = (&*topology.client.name, &*topology.pods.name);
        ip(&["-n", client, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", pods])?;
        for name in [client, pods] {
            ip(&["-n", name, "link", "set", "lo", "up"])?;
            ip(&["-n", name, "link", "set", "eth0", "up"])?;
        }
        for address in CLIENT {
            add(client, address)?;
        }
        Ok(topology)
    }

    /// Gives the pods' namespace an address, of the network of the client's.
    pub(crate) fn add_pod_address(&self, address: std::net::IpAddr) -> Result<()> {
        add(&self.pods.name, &format!("{address}/{}", if address.is_ipv4() { 16 } else { 64 }))
    }

    /// The calling thread is the client's until the guard is dropped.
    pub(crate) fn client(&self) -> Result<NetNsGuard> {
        self.client.enter()
    }

    /// The calling thread is the pods' until the guard is dropped.
    pub(crate) fn pods(&self) -> Result<NetNsGuard> {
        self.pods.enter()
    }

    pub(crate) fn client_name(&self) -> &str {
        &self.client.name
    }

    pub(crate) fn leave(&mut self) {
        self.client.left = true;
        self.pods.left = true;
    }
}

fn add(namespace: &str, address: &str) -> Result<()> {
    let mut words = vec!["-n", namespace, "address", "add", address, "dev", "eth0"];
    if address.contains(':') {
        // Usable at once, without looking for another owner of it.
        words.push("nodad");
    }
    ip(&words)
}

impl Named {
    fn new(role: &str) -> Result<Self> {
        let name = format!("{PREFIX}{role}-{}", process::id());
        ip(&["netns", "add", &name])?;
        let mut named = Self { name, namespace: None, left: false };
        named.namespace = Some(NetNs::open(&Path::new("/run/netns").join(&named.name))?);
        Ok(named)
    }

    fn enter(&self) -> Result<NetNsGuard> {
        self.namespace.as_ref().expect("it is opened when it is made").enter()
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        if self.left {
            return;
        }
        if let Err(error) = ip(&["netns", "delete", &self.name]) {
            eprintln!("warning: a network namespace stays: {error:#}");
        }
    }
}

/// Removes the namespaces of demos that are over; what still ran in them has been swept before.
pub(crate) fn sweep() {
    for entry in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name.strip_prefix(PREFIX).and_then(|it| it.rsplit_once('-'));
        let Some((_, owner)) = owner.filter(|(role, _)| ["client", "pods"].contains(role)) else { continue };
        if !Path::new("/proc").join(owner).exists() {
            drop(Named { name, namespace: None, left: false });
        }
    }
}
