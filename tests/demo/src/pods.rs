//! The pods: one process each, with real servers at real addresses.

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
use tests::{EchoServer, Sandbox};

use crate::topology::Topology;

/// The line by which a pod reports that it listens.
const READY: &str = "ready";

pub(crate) struct Pods {
    pub(crate) children: Vec<KilledOnDrop>,
}

impl Pods {
    /// Starts the pods, by name, and waits until they listen.
    pub(crate) fn start(
        topology: &Topology,
        sandbox: &Sandbox,
        pods: &BTreeMap<String, Vec<SocketAddr>>,
    ) -> Result<Self> {
        let program = env::current_exe().context("cannot find the path of this program")?;
        let mut running = Self { children: Vec::new() };
        for (name, addresses) in pods {
            for address in addresses {
                topology.add_pod_address(address.ip())?;
            }
            let _inside = topology.pods.enter()?;
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
            running.children.push(KilledOnDrop(child));
        }
        for (child, name) in running.children.iter_mut().zip(pods.keys()) {
            let mut line = String::new();
            let stdout = child.0.stdout.take().context("stdout is piped")?;
            BufReader::new(stdout).read_line(&mut line)?;
            if line.trim() != READY {
                bail!("pod {name} does not listen (see its message above)");
            }
        }
        Ok(running)
    }

    pub(crate) fn leave(self) {
        self.children.into_iter().for_each(std::mem::forget);
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
