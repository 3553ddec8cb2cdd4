//! `cargo xtask bench apply`: how long a state in hand takes until it is visible, and what holding one costs.
//! The one rule: the real binary, which says itself how long an apply took, and the kernel's own figures of its memory.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs,
    hint::black_box,
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use ::tests::{
    Agent, Sandbox,
    agent::AgentCommand,
    manifest::{self, Service},
    test_node::NODE,
};
use anyhow::{Context as _, Result};

use crate::{Report, kube::resident_mb};
use build_tools::{build, command::status};

const LIMIT: Duration = Duration::from_secs(120);
/// How many changes a 99th percentile is taken of.
const CHANGES: usize = 300;
/// How many pairs a ratio is taken of.
const PAIRS: usize = 60;
/// How long a change is given to come to rest.
const REST: Duration = Duration::from_millis(60);

/// Measures, and fails if a goal is missed.
pub(crate) fn apply() -> Result<()> {
    let binary = build::build(true)?;
    let mut report = Report::new("CASE");

    status("Measuring", "nothing to serve");
    let mut idle = Running::start(&binary, "idle", 0, 0)?;
    let (idle_mb, idle_maps) = (resident_mb(&idle.agent)?, idle.map_mb()?);
    status("Measuring", "5,000 services of 50 endpoints, at once");
    let full = idle.become_full(5_000, 50)?;
    drop(idle);

    status("Measuring", "10,000 services of 10 endpoints");
    let mut large = Running::start(&binary, "large", 10_000, 10)?;
    let (large_mb, large_maps) = (resident_mb(&large.agent)?, large.map_mb()?);
    for _ in 0..CHANGES / 10 {
        large.change()?;
    }
    let changed_mb = resident_mb(&large.agent)?;
    drop(large);

    status("Measuring", "one endpoint of them");
    let mut large = Running::apart(&binary, "apart", 10_000, 10)?;
    let (mut times, mut own) = (Vec::new(), Vec::new());
    for _ in 0..CHANGES {
        times.push(large.change()?);
        own.push(work());
    }
    times.sort_unstable();
    own.sort_unstable();
    drop(large);

    status("Measuring", "an agent's start to 10,000 services of 10 endpoints");
    let start = agent_start(&binary, 10_000, 10)?;

    status("Measuring", "one change at 44,000 services, and at 1,000");
    let mut pair = [Running::apart(&binary, "many", 44_000, 1)?, Running::apart(&binary, "few", 1_000, 1)?];
    let mut ratios = Vec::new();
    for round in 0..PAIRS {
        let first = round % 2;
        let one = pair[first].change()?.as_secs_f64();
        let other = pair[1 - first].change()?.as_secs_f64();
        let (many, few) = if first == 0 { (one, other) } else { (other, one) };
        ratios.push(many / few);
    }
    ratios.sort_unstable_by(f64::total_cmp);
    let ratio = ratios[ratios.len() / 2];
    drop(pair);

    let median = |times: &[Duration]| milliseconds(times[times.len() / 2]);
    let p99 = |times: &[Duration]| milliseconds(times[times.len() * 99 / 100]);
    report.row("10k x 10: one endpoint changes, 99th percentile", 1.0, p99(&times), "ms", 2);
    report.figure("  the median", median(&times), "ms", 2);
    report.figure("  work beside it that needs nothing but a processor, likewise", p99(&own), "ms", 2);
    report.figure("    the median", median(&own), "ms", 2);
    report.row("one change at 44k services, / at 1k", 1.5, ratio, "x", 2);
    report.row("5k x 50: everything at once", 300.0, milliseconds(full), "ms", 0);
    report.row("10k x 10: an agent's start until it serves", 1_000.0, milliseconds(start), "ms", 0);
    report.row("10k x 10: resident memory of `run`", 150.0, large_mb, "MB", 0);
    report.row("  after the changes", 150.0, changed_mb, "MB", 0);
    report.row("nothing to serve: resident memory of `run`", 20.0, idle_mb, "MB", 1);
    report.print(&format!(
        "From a state in hand until every program sees it, as the binary itself says. The kernel's memory for the maps is \
         {large_maps:.1} MB at 10k x 10, and {idle_maps:.1} MB with nothing to serve. Packets are off."
    ))
}

/// How long a piece of work takes that costs as much as an apply and waits for nothing: what it takes beyond its median
/// was taken by the machine, be it by its host.
fn work() -> Duration {
    let begin = Instant::now();
    for n in 0..40_000_u32 {
        black_box(n);
    }
    begin.elapsed()
}

/// What serves a folder of manifests.
struct Running {
    agent: Agent,
    /// The process that reads them, if it is another one: what it does for that is not the agent's.
    _brain: Option<Agent>,
    manifests: PathBuf,
    endpoints: u32,
    /// How many changes the Service has seen that changes.
    changes: u32,
    // Last, so that the process ends first.
    _sandbox: Sandbox,
}

impl Running {
    fn start(binary: &Path, name: &str, services: u32, endpoints: u32) -> Result<Self> {
        let sandbox = Sandbox::new(&format!("bench-{name}"))?;
        let manifests = folder(&sandbox, services, endpoints)?;
        let setting = quiet(AgentCommand::run(binary, &sandbox, &manifests, NODE));
        let agent = setting.start(&sandbox)?;
        Self { agent, _brain: None, manifests, endpoints, changes: 0, _sandbox: sandbox }.begun()
    }

    /// The same as a brain and an agent.
    fn apart(binary: &Path, name: &str, services: u32, endpoints: u32) -> Result<Self> {
        let sandbox = Sandbox::new(&format!("bench-{name}"))?;
        let manifests = folder(&sandbox, services, endpoints)?;
        let (brain, setting) = brain_and_agent(binary, &sandbox, &manifests)?;
        let agent = setting.start(&sandbox)?;
        Self { agent, _brain: Some(brain), manifests, endpoints, changes: 0, _sandbox: sandbox }.begun()
    }

    fn begun(mut self) -> Result<Self> {
        self.wait_for(1)?;
        // The retired side catches up, and freed memory goes back.
        thread::sleep(Duration::from_secs(2));
        Ok(self)
    }

    /// Changes one endpoint of one Service, with nothing else to do; how long it took from the state in hand.
    fn change(&mut self) -> Result<Duration> {
        self.changes += 1;
        let before = self.applies()?.len();
        // The first endpoint is another one each time.
        let text = service(0, self.endpoints.max(1), self.changes).to_string();
        manifest::write_atomically(&self.manifests.join("first.yaml"), &text)?;
        // Who looks for the end all the time takes a processor that is measured.
        thread::sleep(REST);
        self.wait_for(before + 1)
    }

    /// Has everything to serve at once; how long it took from the state in hand.
    fn become_full(&mut self, services: u32, endpoints: u32) -> Result<Duration> {
        write(&self.manifests, services, endpoints)?;
        // The files are read one after the other: the apply that counts is the one that brings all.
        let log = self.agent.log_path().to_owned();
        let all = format!("services={services} ");
        let mut last = None;
        self.agent.wait_until(LIMIT, || {
            last = times(&log, &all).ok().and_then(|it| it.first().copied());
            last.is_some()
        })?;
        last.context("it was there a moment ago")
    }

    /// Waits for so many applies; how long the last one took.
    fn wait_for(&mut self, applies: usize) -> Result<Duration> {
        let log = self.agent.log_path().to_owned();
        let mut last = None;
        self.agent.wait_until(LIMIT, || {
            last = times(&log, APPLIED).ok().and_then(|it| it.get(applies - 1).copied());
            last.is_some()
        })?;
        last.context("it was there a moment ago")
    }

    fn applies(&self) -> Result<Vec<Duration>> {
        times(self.agent.log_path(), APPLIED)
    }

    /// What the kernel says that the maps take which the process holds, in MB.
    fn map_mb(&self) -> Result<f64> {
        let mut maps = BTreeMap::new();
        for entry in fs::read_dir(format!("/proc/{}/fdinfo", self.agent.pid()))? {
            let text = fs::read_to_string(entry?.path()).unwrap_or_default();
            let field = |name: &str| {
                let line = text.lines().find_map(|it| it.strip_prefix(name)?.strip_prefix(':'));
                line.and_then(|it| it.trim().parse::<u64>().ok())
            };
            if let (Some(id), Some(bytes)) = (field("map_id"), field("memlock")) {
                maps.insert(id, bytes);
            }
        }
        Ok(maps.values().sum::<u64>() as f64 / 1e6)
    }
}

/// Nobody asks it, so that several can run.
fn quiet(setting: AgentCommand) -> AgentCommand {
    ["--metrics-bind-address", "0", "--healthz-bind-address", "0"]
        .into_iter()
        .fold(setting, AgentCommand::arg)
}

/// A brain that reads a folder of manifests, and what an agent is started with that follows it.
fn brain_and_agent(binary: &Path, sandbox: &Sandbox, manifests: &Path) -> Result<(Agent, AgentCommand)> {
    let mut source = OsString::from("file:");
    source.push(manifests);
    let socket = sandbox.files().join("proxy.sock");
    let mut target = OsString::from("unix://");
    target.push(&socket);
    let arguments: [&OsStr; 7] = [
        "brain".as_ref(),
        "--source".as_ref(),
        &source,
        "--node-name".as_ref(),
        NODE.as_ref(),
        "--listen".as_ref(),
        &target,
    ];
    let mut brain = AgentCommand::new(binary, &arguments).start(sandbox)?;
    brain.wait_until(LIMIT, || socket.exists())?;
    let arguments: [&OsStr; 9] = [
        "agent".as_ref(),
        "--target".as_ref(),
        &target,
        "--node-name".as_ref(),
        NODE.as_ref(),
        "--cgroup".as_ref(),
        sandbox.cgroup().as_ref(),
        "--pin-dir".as_ref(),
        sandbox.pins().as_ref(),
    ];
    Ok((brain, quiet(AgentCommand::new(binary, &arguments))))
}

/// From the start of an `agent`, whose brain is there, until the brain's state is in force.
fn agent_start(binary: &Path, services: u32, endpoints: u32) -> Result<Duration> {
    let sandbox = Sandbox::new("bench-agent")?;
    let manifests = folder(&sandbox, services, endpoints)?;
    let (_brain, setting) = brain_and_agent(binary, &sandbox, &manifests)?;
    // The brain has decided when the first agent is served; the second one is measured.
    let mut first = setting.start(&sandbox)?;
    let log = first.log_path().to_owned();
    first.wait_until(LIMIT, || times(&log, APPLIED).is_ok_and(|it| !it.is_empty()))?;
    first.terminate()?;
    let begin = Instant::now();
    let mut agent = setting.start(&sandbox)?;
    let log = agent.log_path().to_owned();
    agent.wait_until(LIMIT, || times(&log, APPLIED).is_ok_and(|it| !it.is_empty()))?;
    Ok(begin.elapsed())
}

/// What the log says of each apply.
const APPLIED: &str = "in force";

/// How long each apply took of which the log says `what`: `took=1.5ms`.
fn times(log: &Path, what: &str) -> Result<Vec<Duration>> {
    let text = fs::read_to_string(log)?;
    // The last line may be half written.
    let lines = text
        .split_inclusive('\n')
        .filter(|it| it.ends_with('\n') && it.contains(APPLIED) && it.contains(what));
    Ok(lines.filter_map(|it| duration(it.rsplit_once("took=")?.1.trim())).collect())
}

/// A duration as Rust writes it.
fn duration(text: &str) -> Option<Duration> {
    let end = text.find(|it: char| !it.is_ascii_digit() && it != '.')?;
    let number: f64 = text[..end].parse().ok()?;
    let seconds = match &text[end..] {
        "ns" => number / 1e9,
        "µs" => number / 1e6,
        "ms" => number / 1e3,
        "s" => number,
        _ => return None,
    };
    Some(Duration::from_secs_f64(seconds))
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Makes a folder of manifests; the first Service has a file of its own.
fn folder(sandbox: &Sandbox, services: u32, endpoints: u32) -> Result<PathBuf> {
    let manifests = sandbox.files().join("manifests");
    fs::create_dir(&manifests)?;
    manifest::write_atomically(&manifests.join("node.yaml"), &manifest::node(NODE))?;
    if services > 0 {
        write(&manifests, services, endpoints)?;
    }
    Ok(manifests)
}

fn write(manifests: &Path, services: u32, endpoints: u32) -> Result<()> {
    let others: Vec<_> = (1..services).map(|n| service(n, endpoints, 0).to_string()).collect();
    manifest::write_atomically(&manifests.join("first.yaml"), &service(0, endpoints, 0).to_string())?;
    manifest::write_atomically(&manifests.join("others.yaml"), &others.join("---\n"))?;
    Ok(())
}

/// A Service whose first endpoint depends on `first`.
fn service(n: u32, endpoints: u32, first: u32) -> Service {
    let it =
        Service::new(&format!("s{n}"), &[Ipv4Addr::from(0x0a60_0000 + n).into()]).port("", "TCP", 80, 8080);
    (0..endpoints).fold(it, |it, slot| {
        let number = if slot == 0 { first } else { 0 };
        let address = IpAddr::from(Ipv4Addr::from(0x0b00_0000 + n * endpoints + slot + (number << 18)));
        it.endpoint(&format!("s{n}-{slot}-{number}"), &[address])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_they_are_written() {
        for time in [Duration::from_nanos(7), Duration::from_nanos(671_868), Duration::from_millis(97), LIMIT]
        {
            assert_eq!(duration(&format!("{time:?}")), Some(time));
        }
        assert_eq!(duration("soon"), None);
    }
}
