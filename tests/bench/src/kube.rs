//! `cargo xtask bench kube`: memory, CPU and received bytes of `run` that follows the API server of a large cluster.
//! Invariant: the real binary, a real server in a process of its own, and the kernel's figures of the binary.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use build_tools::{
    build,
    command::{KilledOnDrop, cargo_into_target, run, status, workspace},
};
use tests::{Sandbox, TestNode, agent::AgentCommand, test_node::NODE};

use crate::{
    figures::{Figures, TEN_EACH},
    kernel_figures::{cpu_seconds, idle_percent, resident_mb},
};

const SERVICES: u32 = 10_000;
const ENDPOINTS: u32 = 10;
const NODES: u32 = 1_000;
const CHANGES_PER_SECOND: u32 = 500;
const CHANGE_SECONDS: u32 = 20;
const IDLE_SECONDS: u32 = 5;
/// A large cluster, whose kubelets report their status every 5 minutes.
const LARGE: [u32; 3] = [100, ENDPOINTS, 5_000];
const HEARTBEATS_PER_SECOND: u32 = 17;
const START_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn bench() -> Result<Figures> {
    let binary = build::build(true)?;
    run(cargo_into_target("build").args(["--release", "--package", "api-server"]))?;
    let mut report = Figures::new(TEN_EACH);
    let cases = [
        ("lists streamed", "--streaming", "off", [180.0, 220.0]),
        ("lists in pages", "--paging", "off", [180.0, 220.0]),
        ("both paths", "--streaming", "nft", [170.0, 220.0]),
    ];
    for (name, flag, packets, [max_listed, max_changed]) in cases {
        status("Measuring", &format!("{SERVICES} services, {name}"));
        // In a network namespace of its own: the packet path must not affect others.
        let node = TestNode::enter(Sandbox::new("bench-kube")?)?;
        let mut server = ServerProcess::start([SERVICES, ENDPOINTS, NODES], flag)?;
        let sandbox = node.sandbox();
        let begin = Instant::now();
        let command = AgentCommand::kube(&binary, sandbox, &server.url, NODE).args(["--packets", packets]);
        let mut agent = command.start(sandbox)?;
        agent.wait_until_applied(START_TIMEOUT)?;
        let first = begin.elapsed();
        // The spare side of the maps catches up.
        thread::sleep(Duration::from_secs(2));
        let listed = resident_mb(&agent)?;

        let (before, begin) = (cpu_seconds(&agent)?, Instant::now());
        server.change("slices", CHANGES_PER_SECOND, CHANGE_SECONDS)?;
        let load = (cpu_seconds(&agent)? - before) / begin.elapsed().as_secs_f64() * 100.0;
        let changed = resident_mb(&agent)?;
        let idle = idle_percent(&agent, IDLE_SECONDS)?;
        agent.terminate()?;

        report.row(&format!("{name}: first state in the kernel"), 5.0, first.as_secs_f64(), "s", 2);
        report.row("  resident after the list", max_listed, listed, "MB", 0);
        report.row("  500 changes per second, of one core", 20.0, load, "%", 1);
        report.row("  resident after the changes", max_changed, changed, "MB", 0);
        report.row("  without changes, of one core", 1.0, idle, "%", 1);
    }
    let cases: [(&str, &[&str], _); 2] =
        [("own Node only", &[], [0.1, 0.2]), ("all Nodes", &["--watch-all-nodes"], [500.0, 10.0])];
    for (name, flags, goals) in cases {
        status("Measuring", &format!("{} Nodes and their heartbeats, {name}", LARGE[2]));
        let mut server = ServerProcess::start(LARGE, "--streaming")?;
        let sandbox = Sandbox::new("bench-kube")?;
        let command = AgentCommand::kube(&binary, &sandbox, &server.url, NODE).args(flags);
        let mut agent = command.start(&sandbox)?;
        agent.wait_until_applied(START_TIMEOUT)?;
        thread::sleep(Duration::from_secs(2));
        let before = (server.change("heartbeats", 0, 0)?, cpu_seconds(&agent)?);
        let begin = Instant::now();
        let sent = server.change("heartbeats", HEARTBEATS_PER_SECOND, CHANGE_SECONDS)? - before.0;
        let seconds = begin.elapsed().as_secs_f64();
        let load = (cpu_seconds(&agent)? - before.1) / seconds * 100.0;
        let resident = resident_mb(&agent)?;
        agent.terminate()?;
        let [max_sent, max_load] = goals;
        let case = format!("{} Nodes, {name}: received", LARGE[2]);
        report.row(&case, max_sent, sent as f64 / 1e3 / seconds, "kB/s", 2);
        report.row("  of one core", max_load, load, "%", 2);
        report.figure("  resident", resident, "MB", 0);
    }
    Ok(report.method(format!(
        "`run` on one node of {NODES}, {SERVICES} Services; the API server is a process of its own on the same \
         machine."
    )))
}

struct ServerProcess {
    child: KilledOnDrop,
    lines: BufReader<ChildStdout>,
    url: String,
}

impl ServerProcess {
    /// With so many Services, endpoints of each, and Nodes.
    fn start(numbers: [u32; 3], flag: &str) -> Result<Self> {
        let numbers = numbers.map(|it| it.to_string());
        let mut child = Command::new(workspace().join("target/release/api-server"))
            .args(numbers)
            .arg(flag)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start target/release/api-server")?;
        let lines = BufReader::new(child.stdout.take().context("stdout is piped")?);
        let mut server = Self { child: KilledOnDrop(child), lines, url: String::new() };
        server.url = server.line()?;
        Ok(server)
    }

    /// Changes `rate` objects per second, for `seconds`; returns how many bytes it has sent so far.
    fn change(&mut self, what: &str, rate: u32, seconds: u32) -> Result<u64> {
        let input = self.child.0.stdin.as_mut().context("stdin is piped")?;
        writeln!(input, "{what} {rate} {seconds}")?;
        self.line()?.parse().context("the server prints a number")
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }
}
