//! A hostile pod: a process without capabilities, in a network namespace and a cgroup of its own.
//!
//! It is the test binary itself, run again for its ignored test [`PROCESS`], which a test file defines by calling [`attack`].
//! An attack is one line of JSON; the pod reports in another how far it came, and holds its sockets until it is dropped.

use std::{
    env, fs,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::SocketAddr,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use crate::{NetNs, Sandbox, agent::spawn_without_capabilities, sandbox::move_to};

/// The name of the ignored test that is the process.
pub const PROCESS: &str = "hostile_process";
/// The environment variable with the attack.
const ATTACK: &str = "KUBE_PROXY_EBPF_TEST_ATTACK";
/// What the report begins with.
const REPORT: &str = "attacked:";

#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Attack {
    kind: Kind,
    number: usize,
    to: Vec<SocketAddr>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
enum Kind {
    SendUdp,
    ConnectTcp,
}

impl Attack {
    /// Opens UDP sockets, and sends from each one datagram to each destination.
    pub fn send_udp(sockets: usize, to: &[SocketAddr]) -> Self {
        Self { kind: Kind::SendUdp, number: sockets, to: to.to_vec() }
    }

    /// Opens TCP sockets that connect to a destination.
    pub fn connect_tcp(sockets: usize, to: SocketAddr) -> Self {
        Self { kind: Kind::ConnectTcp, number: sockets, to: vec![to] }
    }
}

/// How far an attack came.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct AttackReport {
    /// Calls that succeeded.
    pub done: usize,
    /// Calls that failed with ENOBUFS, or EPERM before Linux 5.18.
    pub refused: usize,
}

/// A pod with its process. Dropping it kills the process and removes the cgroup.
#[derive(Debug)]
pub struct Pod {
    cgroup: PathBuf,
    process: Child,
    pub report: AttackReport,
}

impl Pod {
    /// Makes a pod, where all endpoints' addresses are local without servers, and attacks; fails if its process reports nothing.
    pub fn attack(sandbox: &Sandbox, name: &str, attack: &Attack) -> Result<Self> {
        // A process without capabilities inherits the limit.
        let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).context("getrlimit")?;
        setrlimit(Resource::RLIMIT_NOFILE, most, most).context("setrlimit")?;
        let netns = NetNs::with_local_endpoints()?;
        let cgroup = sandbox.cgroup().join(name);
        fs::create_dir(&cgroup).with_context(|| format!("cannot create {}", cgroup.display()))?;
        let mut command = Command::new(env::current_exe()?);
        command
            .args([PROCESS, "--exact", "--ignored", "--nocapture"])
            .env(ATTACK, serde_json::to_string(attack)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = netns.run(|| spawn_without_capabilities(&mut command))?;
        move_to(&cgroup, process.id())?;
        // It waits for a line: before, its sockets would belong to the sandbox's cgroup.
        process.stdin.as_mut().context("stdin is a pipe")?.write_all(b"go\n")?;
        let output = process.stdout.take().context("stdout is a pipe")?;
        let mut lines = BufReader::new(output).lines().map_while(Result::ok);
        let report = lines.find_map(|it| it.split_once(REPORT).map(|(_, it)| it.to_owned()));
        let report = report.with_context(|| format!("{name} ended without a report"))?;
        Ok(Self { cgroup, process, report: serde_json::from_str(&report)? })
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir(&self.cgroup);
    }
}

/// Carries out the attack of this process, if it is that of a [`Pod`]. Call it in an ignored test named [`PROCESS`].
pub fn attack() {
    let Ok(attack) = env::var(ATTACK) else { return };
    let attack: Attack = serde_json::from_str(&attack).expect("a pod sets a valid attack");
    let mut line = String::new();
    io::stdin().read_line(&mut line).expect("a pod writes a line");
    let mut report = AttackReport::default();
    let sockets = attack.run(&mut report).expect("an attack needs no privileges");
    println!("{REPORT}{}", serde_json::json!(report));
    // Until the pod is dropped.
    let _ = io::stdin().read(&mut [0]);
    drop(sockets);
}

impl Attack {
    fn run(&self, report: &mut AttackReport) -> Result<Vec<Socket>> {
        let mut opened = Vec::new();
        let transport = if self.kind == Kind::ConnectTcp { Type::STREAM } else { Type::DGRAM };
        for _ in 0..self.number {
            let socket = Socket::new(Domain::for_address(self.to[0]), transport, None)?;
            for to in &self.to {
                report.count(match self.kind {
                    Kind::SendUdp => socket.send_to(b"who?", &(*to).into()).map(|_| ()),
                    Kind::ConnectTcp => socket.connect(&(*to).into()),
                });
            }
            opened.push(socket);
        }
        Ok(opened)
    }
}

impl AttackReport {
    fn count(&mut self, result: io::Result<()>) {
        match result.map_err(|it| it.raw_os_error()) {
            // The programs have run before there was no server.
            Ok(()) | Err(Some(nix::libc::ECONNREFUSED)) => self.done += 1,
            Err(Some(nix::libc::ENOBUFS | nix::libc::EPERM)) => self.refused += 1,
            Err(error) => panic!("an attack fails with errno {error:?}"),
        }
    }
}
