//! A cluster of two network namespaces, joined by a veth pair: one of the client, and one of the pods, which are a process each with
//! real servers at real addresses.

use std::{
    collections::BTreeMap,
    env,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    os::unix::process::CommandExt as _,
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context as _, Result, bail};
use build_tools::command::KilledOnDrop;
use tests::{EchoServer, NetNs, Sandbox};

const INTERFACE: &str = "eth0";
/// The client's own addresses, in the networks of the pods.
const CLIENT: [&str; 2] = ["10.244.0.1/16", "fd00:10:244::1/64"];
/// The line by which a pod reports that it listens.
const READY: &str = "ready";

pub(crate) struct Cluster {
    /// Their namespace exists as long as one of them does.
    pub(crate) pods: Vec<KilledOnDrop>,
    pub(crate) client: NetNs,
}

impl Cluster {
    /// Starts the pods, by name, and waits until they listen.
    pub(crate) fn start(sandbox: &Sandbox, pods: &BTreeMap<String, Vec<SocketAddr>>) -> Result<Self> {
        let (client, namespace) = (NetNs::new()?, NetNs::new()?);
        client.connect_veth(INTERFACE, &namespace, INTERFACE)?;
        CLIENT.iter().try_for_each(|it| client.add_interface_address(it, INTERFACE))?;
        let program = env::current_exe().context("cannot find the path of this program")?;
        let mut running = Vec::new();
        for (name, addresses) in pods {
            for address in addresses {
                // In the client's network.
                let length = if address.is_ipv4() { 16 } else { 64 };
                namespace.add_interface_address(&format!("{}/{length}", address.ip()), INTERFACE)?;
            }
            let _inside = namespace.enter()?;
            let child = Command::new(&program)
                .args(["--pod", name])
                .args(addresses.iter().map(ToString::to_string))
                // Ctrl-C reaches only the demo, which then ends the pods.
                .process_group(0)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .with_context(|| format!("cannot start pod {name}"))?;
            sandbox.add_process(child.id())?;
            running.push(KilledOnDrop(child));
        }
        for (child, name) in running.iter_mut().zip(pods.keys()) {
            let mut line = String::new();
            let stdout = child.0.stdout.take().context("stdout is piped")?;
            BufReader::new(stdout).read_line(&mut line)?;
            if line.trim() != READY {
                bail!("pod {name} does not listen (see its message above)");
            }
        }
        Ok(Self { pods: running, client })
    }
}

/// Serves as a pod until killed.
pub(crate) fn serve(name: &str, addresses: &[SocketAddr]) -> Result<()> {
    let _servers: Vec<_> = addresses.iter().map(|&it| EchoServer::start(name, it)).collect::<Result<_>>()?;
    println!("{READY}");
    loop {
        thread::park();
    }
}
