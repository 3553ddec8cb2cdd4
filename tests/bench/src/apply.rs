//! `cargo xtask bench apply`: the time from a received state until every program uses it, and its memory.
//! Invariant: the real binary; it logs how long an apply took, and the kernel reports its memory.

use std::{
    fs,
    hint::black_box,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use ::tests::{
    Agent, Sandbox,
    agent::{APPLIED, AgentCommand},
    manifest::{self, Service},
    test_node::NODE,
};
use anyhow::{Context as _, Result};
use build_tools::{build, command::status};
use jiff::SignedDuration;

use crate::{
    figures::{Figures, median, milliseconds, percentiles},
    kernel_figures::{memory_mb, open_maps},
};

const APPLY_TIMEOUT: Duration = Duration::from_secs(120);
/// How many changes a 99th percentile is calculated from.
const CHANGES: usize = 300;
/// How many pairs a median ratio is calculated from.
const PAIRS: usize = 60;
/// How long a change is given before the log is read: polling takes CPU time from what is measured.
const SETTLE_TIME: Duration = Duration::from_millis(60);

pub(crate) fn bench() -> Result<Figures> {
    let binary = build::build(true)?;
    let mut report = Figures::new("CASE");

    status("Measuring", "no services");
    let mut idle = BenchProxy::start(&binary, false, 0, 0)?;
    let (idle_mb, idle_maps) = (idle.resident_mb()?, idle.map_mb()?);
    status("Measuring", "5,000 services of 50 endpoints, at once");
    let full = idle.apply_at_once(5_000, 50)?;
    drop(idle);

    status("Measuring", "10,000 services of 10 endpoints");
    let mut large = BenchProxy::start(&binary, false, 10_000, 10)?;
    let (large_mb, large_maps) = (large.resident_mb()?, large.map_mb()?);
    for _ in 0..CHANGES / 10 {
        large.change()?;
    }
    let changed_mb = large.resident_mb()?;
    drop(large);

    status("Measuring", "a change of one endpoint");
    let mut large = BenchProxy::start(&binary, true, 10_000, 10)?;
    let mut reference = Vec::new();
    let times = large.changes(|| reference.push(reference_work()))?;
    let agent_mb = large.resident_mb()?;
    status("Measuring", "the same with 5,000 dual-stack nodes");
    manifest::write_atomically(&large.manifests.join("nodes.yaml"), &nodes(5_000))?;
    wait_for_apply(&mut large.agent, APPLIED, times.len() + 2)?;
    let with_nodes = large.changes(|| ())?;
    drop(large);

    status("Measuring", "the start of an agent with 10,000 services of 10 endpoints");
    let start = agent_start(&binary, 10_000, 10)?;

    status("Measuring", "a change at 44,000 services, and at 1,000");
    let mut pair =
        [BenchProxy::start(&binary, true, 44_000, 1)?, BenchProxy::start(&binary, true, 1_000, 1)?];
    let mut ratios = Vec::new();
    for round in 0..PAIRS {
        let mut took = [Duration::ZERO; 2];
        for which in [round % 2, 1 - round % 2] {
            took[which] = pair[which].change()?;
        }
        ratios.push(took[0].div_duration_f64(took[1]));
    }
    drop(pair);

    let [times, with_nodes, reference] = [times, with_nodes, reference].map(percentiles);
    report.row("10k x 10: one endpoint changes, 99th percentile", 1.0, times(99), "ms", 2);
    report.figure("  the median", times(50), "ms", 2);
    report.row("  with 5,000 dual-stack nodes", 1.0, with_nodes(99), "ms", 2);
    report.figure("  the median", with_nodes(50), "ms", 2);
    report.figure("  reference work that needs only a CPU, 99th percentile", reference(99), "ms", 2);
    report.figure("    the median", reference(50), "ms", 2);
    report.row("one change at 44k services / at 1k", 1.5, median(ratios), "x", 2);
    report.row("5k x 50: everything at once", 300.0, milliseconds(full), "ms", 0);
    report.row("10k x 10: an agent's start until it serves", 1_000.0, milliseconds(start), "ms", 0);
    report.row("10k x 10: resident memory of `run`", 150.0, large_mb, "MB", 0);
    report.row("  after the changes", 150.0, changed_mb, "MB", 0);
    report.figure("  of `agent`, whose brain is another process", agent_mb, "MB", 0);
    report.row("no services: resident memory of `run`", 20.0, idle_mb, "MB", 1);
    Ok(report.method(format!(
        "From a received state until every program uses it, as logged by the binary. The maps take {large_maps:.1} MB of \
         kernel memory at 10k x 10, and {idle_maps:.1} MB without services. The nftables path is off."
    )))
}

/// The time in milliseconds of a computation that costs as much as an apply and waits for nothing: what it takes beyond its
/// median is due to other load on the machine or its host.
fn reference_work() -> f64 {
    let begin = Instant::now();
    for n in 0..40_000_u32 {
        black_box(n);
    }
    milliseconds(begin.elapsed())
}

/// A proxy that serves a folder of manifests.
struct BenchProxy {
    agent: Agent,
    /// The process that reads the manifests, if the proxy is split: its work is not the agent's.
    _brain: Option<Agent>,
    manifests: PathBuf,
    endpoints: u32,
    /// How often the first Service has changed.
    changes: u32,
    // Dropped last: the processes end first.
    _sandbox: Sandbox,
}

impl BenchProxy {
    /// In one process, or split into a brain and an agent.
    fn start(binary: &Path, is_split: bool, services: u32, endpoints: u32) -> Result<Self> {
        let sandbox = Sandbox::new(&format!("bench-{services}"))?;
        let manifests = folder(&sandbox, services, endpoints)?;
        let (brain, command) = if is_split {
            let (brain, command) = start_brain(binary, &sandbox, &manifests)?;
            (Some(brain), command)
        } else {
            (None, without_ports(AgentCommand::run(binary, &sandbox, &manifests, NODE)))
        };
        let mut agent = command.start(&sandbox)?;
        wait_for_apply(&mut agent, APPLIED, 1)?;
        // The spare side of the maps catches up, and freed memory is returned.
        thread::sleep(Duration::from_secs(2));
        Ok(Self { agent, _brain: brain, manifests, endpoints, changes: 0, _sandbox: sandbox })
    }

    /// Changes one endpoint of one Service; returns how long the apply took.
    fn change(&mut self) -> Result<Duration> {
        self.changes += 1;
        let before = apply_times(self.agent.log_path(), APPLIED)?.len();
        // The first endpoint differs each time.
        let text = service(0, self.endpoints.max(1), self.changes).to_string();
        manifest::write_atomically(&self.manifests.join("first.yaml"), &text)?;
        thread::sleep(SETTLE_TIME);
        wait_for_apply(&mut self.agent, APPLIED, before + 1)
    }

    /// Makes many changes, with other work between them; returns how long each took, in milliseconds.
    fn changes(&mut self, mut between: impl FnMut()) -> Result<Vec<f64>> {
        let mut times = Vec::new();
        for _ in 0..CHANGES {
            times.push(milliseconds(self.change()?));
            between();
        }
        Ok(times)
    }

    /// Adds all Services at once; returns how long the apply took.
    fn apply_at_once(&mut self, services: u32, endpoints: u32) -> Result<Duration> {
        write(&self.manifests, services, endpoints)?;
        // Files are read one after the other: the apply with all Services is the one to measure.
        wait_for_apply(&mut self.agent, &format!("services={services} "), 1)
    }

    fn resident_mb(&self) -> Result<f64> {
        memory_mb(self.agent.pid(), "VmRSS")
    }

    /// The kernel memory of all maps that the agent has open, in MB.
    fn map_mb(&self) -> Result<f64> {
        let maps = open_maps(self.agent.pid())?;
        Ok(maps.values().sum::<u64>() as f64 / 1e6)
    }
}

/// Without the ports for probes, health and metrics, so that several proxies can run.
pub(crate) fn without_ports(command: AgentCommand) -> AgentCommand {
    command.args(["--metrics-bind-address=0", "--healthz-bind-address=0", "--probe-bind-address=0"])
}

/// Starts a brain that reads a folder of manifests; returns it with the command for its agent.
fn start_brain(binary: &Path, sandbox: &Sandbox, manifests: &Path) -> Result<(Agent, AgentCommand)> {
    let mut brain = AgentCommand::brain(binary, sandbox, manifests, NODE).start(sandbox)?;
    let socket = sandbox.files().join("proxy.sock");
    brain.wait_until(APPLY_TIMEOUT, || socket.exists())?;
    Ok((brain, without_ports(AgentCommand::agent(binary, sandbox, NODE))))
}

/// From the start of an `agent`, whose brain runs, until the brain's state is active.
fn agent_start(binary: &Path, services: u32, endpoints: u32) -> Result<Duration> {
    let sandbox = Sandbox::new("bench-agent")?;
    let manifests = folder(&sandbox, services, endpoints)?;
    let (_brain, command) = start_brain(binary, &sandbox, &manifests)?;
    // Once the first agent is served, the brain has its state; the second agent is measured.
    let mut first = command.start(&sandbox)?;
    wait_for_apply(&mut first, APPLIED, 1)?;
    first.terminate()?;
    let begin = Instant::now();
    let mut agent = command.start(&sandbox)?;
    wait_for_apply(&mut agent, APPLIED, 1)?;
    Ok(begin.elapsed())
}

/// Waits for apply number `count` whose log line contains `text`; returns how long it took.
fn wait_for_apply(agent: &mut Agent, text: &str, count: usize) -> Result<Duration> {
    let log = agent.log_path().to_owned();
    let mut time = None;
    agent.wait_until(APPLY_TIMEOUT, || {
        time = apply_times(&log, text).ok().and_then(|it| it.get(count - 1).copied());
        time.is_some()
    })?;
    time.context("the condition has set it")
}

/// How long each apply took whose log line contains `text`: `took=1.5ms`.
fn apply_times(log: &Path, text: &str) -> Result<Vec<Duration>> {
    let log = fs::read_to_string(log)?;
    // The last line may be incomplete.
    let lines = log
        .split_inclusive('\n')
        .filter(|it| it.ends_with('\n') && it.contains(APPLIED) && it.contains(text));
    Ok(lines.filter_map(|it| duration(it.rsplit_once("took=")?.1.trim())).collect())
}

/// Parses the `Debug` form of a duration.
fn duration(text: &str) -> Option<Duration> {
    text.parse().ok().map(SignedDuration::unsigned_abs)
}

/// Makes a folder of manifests; the first Service has a file of its own.
pub(crate) fn folder(sandbox: &Sandbox, services: u32, endpoints: u32) -> Result<PathBuf> {
    let manifests = sandbox.files().join("manifests");
    fs::create_dir(&manifests)?;
    manifest::write_atomically(&manifests.join("node.yaml"), &manifest::node(NODE))?;
    if services > 0 {
        write(&manifests, services, endpoints)?;
    }
    Ok(manifests)
}

fn write(manifests: &Path, services: u32, endpoints: u32) -> Result<()> {
    let others: String = (1..services).map(|n| service(n, endpoints, 0).to_string()).collect();
    manifest::write_atomically(&manifests.join("first.yaml"), &service(0, endpoints, 0).to_string())?;
    manifest::write_atomically(&manifests.join("others.yaml"), &others)?;
    Ok(())
}

/// Nodes with an address of each family.
fn nodes(count: u32) -> String {
    let address = |n: u32| {
        [Ipv4Addr::from(0x0ac8_0000 + n).into(), Ipv6Addr::from((0xfd00 << 112) + u128::from(n)).into()]
    };
    let nodes = (0..count)
        .map(|n| format!("---\n{}", manifest::node_with_addresses(&format!("worker-{n}"), &address(n))));
    nodes.collect()
}

pub(crate) fn service(n: u32, endpoints: u32, first: u32) -> Service {
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
    fn durations_are_parsed_in_every_unit() {
        for nanoseconds in [7, 671_868, 97_000_000, 1_000_000_001, 120_000_000_000] {
            let time = Duration::from_nanos(nanoseconds);
            assert_eq!(duration(&format!("{time:?}")), Some(time));
        }
        assert_eq!(duration("soon"), None);
    }
}
