//! `cargo xtask bench kube`: what following a large cluster's API server costs a node.
//! The one rule: the real binary, a real server in a process of its own, and the kernel's own figures of the binary.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use tests::{Agent, Sandbox, agent::AgentCommand, test_node::NODE};

use crate::{Report, TEN_EACH};
use build_tools::{
    build,
    command::{cargo, run, status, workspace},
};

const SERVICES: u32 = 10_000;
const ENDPOINTS: u32 = 10;
const NODES: u32 = 1_000;
/// Changes in a second, and for how many seconds.
const CHANGES: (u32, u32) = (500, 20);
const LIMIT: Duration = Duration::from_secs(60);

/// Measures, and fails if a goal is missed.
pub(crate) fn kube() -> Result<()> {
    let binary = build::build(true)?;
    let target = workspace().join("target");
    run(cargo().args(["build", "--release", "--package", "api-server", "--target-dir"]).arg(&target))?;
    let mut report = Report::new(TEN_EACH);
    for (name, flag) in [("streamed", "--streaming"), ("by pages", "--paging")] {
        status("Measuring", &format!("{SERVICES} services, lists {name}"));
        let mut server = Server::start(flag)?;
        let sandbox = Sandbox::new("bench-kube")?;
        let begin = Instant::now();
        let arguments = [
            "run".as_ref(),
            "--source".as_ref(),
            "kube".as_ref(),
            "--kube-api-server".as_ref(),
            server.url.as_ref(),
            "--node-name".as_ref(),
            NODE.as_ref(),
            "--cgroup".as_ref(),
            sandbox.cgroup().as_os_str(),
            "--pin-dir".as_ref(),
            sandbox.pins().as_os_str(),
        ];
        let mut agent = AgentCommand::new(&binary, &arguments).start(&sandbox)?;
        let log = agent.log_path().to_owned();
        let is_in_force = || fs::read_to_string(&log).is_ok_and(|it| it.contains("in force"));
        agent.wait_until(LIMIT, is_in_force)?;
        let first = begin.elapsed();
        // The retired side catches up.
        thread::sleep(Duration::from_secs(2));
        let listed = resident_mb(&agent)?;

        let (before, began) = (cpu_seconds(&agent)?, Instant::now());
        server.change(CHANGES.0, CHANGES.1)?;
        let load = (cpu_seconds(&agent)? - before) / began.elapsed().as_secs_f64() * 100.0;
        let changed = resident_mb(&agent)?;
        let idle = cpu_seconds(&agent)?;
        thread::sleep(Duration::from_secs(5));
        let idle = (cpu_seconds(&agent)? - idle) / 5.0 * 100.0;
        agent.terminate()?;

        report.row(&format!("lists {name}: first state in the kernel"), 5.0, first.as_secs_f64(), "s", 2);
        report.row("  resident after the list", 180.0, listed, "MB", 0);
        report.row("  500 changes a second, of one core", 20.0, load, "%", 1);
        report.row("  resident after the changes", 220.0, changed, "MB", 0);
        report.row("  nothing happens, of one core", 1.0, idle, "%", 1);
    }
    report.print(&format!(
        "`run` on one node of {NODES}, {SERVICES} Services; the API server is a process of its own on the same \
         machine."
    ))
}

/// The resident memory of a process.
pub(crate) fn resident_mb(agent: &Agent) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{}/status", agent.pid()))?;
    let line = text.lines().find_map(|it| it.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kilobytes: f64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kilobytes / 1024.0)
}

/// The CPU time of a process so far.
fn cpu_seconds(agent: &Agent) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{}/stat", agent.pid()))?;
    // The name, in parentheses, may have anything in it; utime and stime are the 14th and 15th of all.
    let fields: Vec<_> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks: u64 =
        fields.get(11..13).context("no times")?.iter().filter_map(|it| it.parse::<u64>().ok()).sum();
    // USER_HZ, which is 100 on every Linux that we run on.
    Ok(f64::from(u32::try_from(ticks)?) / 100.0)
}

/// The API server.
struct Server {
    child: Child,
    lines: BufReader<ChildStdout>,
    url: String,
}

impl Server {
    fn start(flag: &str) -> Result<Self> {
        let numbers = [SERVICES, ENDPOINTS, NODES].map(|it| it.to_string());
        let mut child = Command::new(workspace().join("target/release/api-server"))
            .args(numbers)
            .arg(flag)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start target/release/api-server")?;
        let lines = BufReader::new(child.stdout.take().context("it has no output")?);
        let mut server = Self { child, lines, url: String::new() };
        server.url = server.line()?;
        Ok(server)
    }

    /// Lets it change so many objects a second, for so many seconds.
    fn change(&mut self, rate: u32, seconds: u32) -> Result<()> {
        let input = self.child.stdin.as_mut().context("it has no input")?;
        writeln!(input, "{rate} {seconds}")?;
        self.line().map(drop)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
