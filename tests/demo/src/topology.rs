//! Two network namespaces, joined by a veth pair: one of the client, one of the pods.

use std::{fs, net::IpAddr, path::Path, process};

use anyhow::Result;
use tests::{NetNs, netns::ip};

/// The name of a client's namespace that is kept, followed by the process id of its demo.
const PREFIX: &str = "kpe-client-";
const INTERFACE: &str = "eth0";
/// The client's own addresses, in the networks of the pods.
const CLIENT: [&str; 2] = ["10.244.0.1/16", "fd00:10:244::1/64"];

pub(crate) struct Topology {
    pub(crate) client: NetNs,
    pub(crate) pods: NetNs,
}

impl Topology {
    pub(crate) fn new() -> Result<Self> {
        let (client, pods) = (NetNs::new()?, NetNs::new()?);
        client.connect_veth(INTERFACE, &pods, INTERFACE)?;
        CLIENT.iter().try_for_each(|it| client.add_interface_address(it, INTERFACE))?;
        Ok(Self { client, pods })
    }

    /// Adds an address to the pods' namespace, in the client's network.
    pub(crate) fn add_pod_address(&self, address: IpAddr) -> Result<()> {
        let length = if address.is_ipv4() { 16 } else { 64 };
        self.pods.add_interface_address(&format!("{address}/{length}"), INTERFACE)
    }

    /// Gives the client's namespace a name, so that it outlives this process; the pods keep their own.
    pub(crate) fn keep(&self) -> Result<String> {
        let pid = process::id().to_string();
        let name = format!("{PREFIX}{pid}");
        // It names the namespace of the main thread.
        let _client = self.client.enter()?;
        ip(&["netns", "attach", &name, &pid])?;
        Ok(name)
    }
}

/// Removes the namespaces of demos that have ended; their processes have been killed with their sandboxes.
pub(crate) fn remove_stale() {
    for entry in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(owner) = name.strip_prefix(PREFIX) else { continue };
        if !Path::new("/proc").join(owner).exists()
            && let Err(error) = ip(&["netns", "delete", &name])
        {
            eprintln!("warning: cannot remove a network namespace: {error:#}");
        }
    }
}
