//! `cargo xtask bench fleet`: what one brain costs that serves thousands of nodes, and how long they wait for a change.
//! Invariant: the real binary, a connection for each node, and the kernel's figures of the brain.

use std::{
    fs::File,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use api_server::{ApiServer, Settings};
use build_tools::{
    build,
    command::{KilledOnDrop, cargo_into_target, run, status, workspace},
};
use clap::Args;
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use crate::{
    figures::{Figures, milliseconds, percentiles},
    kernel_figures::{cpu_seconds, memory_mb},
    objects,
};

/// The endpoints of each Service but the one that is updated.
const ENDPOINTS: u32 = 10;
/// The pods of the Service that gets a rolling update.
const ROLLED_PODS: u32 = 100;
const ROLLED_PER_SECOND: u32 = 10;
/// The node that dies has one in so many endpoints, 3 %.
const DEAD_SHARE: u32 = 33;
const CHANGES: u32 = 10;
const SYNC_TIMEOUT: Duration = Duration::from_secs(1_800);
/// How often something changes while all others ask.
const MEANWHILE_INTERVAL: Duration = Duration::from_secs(1);
/// A brain returns freed memory every 15 s.
const SETTLE_TIME: Duration = Duration::from_secs(20);

/// What `bench fleet` measures.
#[derive(Clone, Debug, Args)]
pub(crate) struct FleetArguments {
    /// The number of nodes that follow the brain, each over a connection of its own
    #[arg(long, default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(2..=8_000))]
    agents: u32,
    /// The number of Services, with 10 endpoints each
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(100..=60_000))]
    services: u32,
    /// Measure this binary instead of a release build, with agents of a debug build: for a look at what a change does
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
}

pub(crate) fn bench(arguments: FleetArguments) -> Result<Figures> {
    let FleetArguments { agents, services, binary } = arguments;
    let is_debug = binary.is_some();
    let binary = binary.map_or_else(|| build::build(true), Ok)?;
    let flag = (!is_debug).then_some("--release");
    let example = ["--package", "grpc-server", "--example", "fleet"];
    run(cargo_into_target("build").args(example).args(flag))?;
    let profile = if is_debug { "debug" } else { "release" };
    let example = workspace().join("target").join(profile).join("examples/fleet");

    let folder = tempfile::tempdir()?;
    let cluster = Cluster::start(services, agents)?;
    let brain = BrainProcess::start(&binary, folder.path(), &cluster)?;
    let mut report = Figures::new("CASE");
    status("Measuring", &format!("{agents} nodes, {services} Services of {ENDPOINTS} endpoints"));

    let mut first = Agents::start(&example, &brain.socket, 0, 1)?;
    first.wait_for("synced 1 ")?;
    let alone = brain.resident_mb("VmRSS")?;
    report.figure("one node: resident", alone, "MB", 0);

    // All others ask at once, and meanwhile the first node waits for changes.
    let (before, begin) = (brain.cpu()?, now()?);
    let mut others = Agents::start(&example, &brain.socket, 1, agents)?;
    let mut worst = Duration::ZERO;
    let mut changes = 0;
    let synced = loop {
        let changed = Instant::now();
        let took = cluster.change(&mut [&mut first], services / 2 + changes % 10)?;
        worst = worst.max(took);
        changes += 1;
        let wait = MEANWHILE_INTERVAL.saturating_sub(changed.elapsed());
        if let Some(synced) = others.poll("synced 1 ", wait)? {
            break synced;
        }
    };
    let further = f64::from(agents - 1);
    let case = "all others ask at once: until a node has a change meanwhile, at most";
    report.row(case, 250.0, milliseconds(worst), "ms", 0);
    report.figure("  until all have their first state", (synced - begin).as_secs_f64(), "s", 1);
    report.figure("  CPU per node", (brain.cpu()? - before) / further * 1e3, "ms", 1);
    report.figure("  bytes per node", others.received as f64 / further / 1e3, "kB", 1);
    report.figure("  resident at most", brain.resident_mb("VmHWM")?, "MB", 0);
    thread::sleep(SETTLE_TIME);
    let resident = brain.resident_mb("VmRSS")?;
    report.figure("  resident after that", resident, "MB", 0);
    report.row("  per further node", 100.0, (resident - alone) * 1024.0 / further, "kB", 1);

    let mut fleet = [&mut first, &mut others];
    let kilobytes_per_node = |fleet: &[&mut Agents], before: u64| {
        (others_received(fleet) - before) as f64 / f64::from(agents) / 1e3
    };
    let (before, received) = (brain.cpu()?, others_received(&fleet));
    let sent = cluster.server.sent();
    let mut times = Vec::new();
    for index in 0..CHANGES {
        times.push(milliseconds(cluster.change(&mut fleet, index)?));
    }
    let times = percentiles(times);
    let per_change = |it: f64| it / f64::from(CHANGES);
    report.row("one endpoint changes: until all nodes have it, median", 1_000.0, times(50), "ms", 0);
    report.figure("  at most", times(100), "ms", 0);
    report.figure("  CPU", per_change(brain.cpu()? - before) * 1e3, "ms", 0);
    let bytes = others_received(&fleet) - received;
    report.figure("  bytes per node", per_change(bytes as f64) / f64::from(agents), "B", 0);
    let sent = (cluster.server.sent() - sent) as f64;
    report.figure("  bytes from the API server to the brain", per_change(sent), "B", 0);

    let (before, received) = (brain.cpu()?, others_received(&fleet));
    let rolled = cluster.roll(&mut fleet)?;
    let case = "100 pods are replaced, 10 per second: until all nodes have the last";
    report.row(case, 1_000.0, milliseconds(rolled), "ms", 0);
    report.figure("  CPU in all", brain.cpu()? - before, "s", 2);
    report.figure("  bytes per node", kilobytes_per_node(&fleet, received), "kB", 1);

    let (before, received) = (brain.cpu()?, others_received(&fleet));
    let died = cluster.kill_node(&mut fleet)?;
    let case = "a node with 3 % of the endpoints dies: until all nodes have it";
    report.row(case, 5_000.0, milliseconds(died), "ms", 0);
    report.figure("  CPU", brain.cpu()? - before, "s", 2);
    report.figure("  bytes per node", kilobytes_per_node(&fleet, received), "kB", 1);

    let received = others_received(&fleet);
    drop(brain);
    let begin = now()?;
    let brain = BrainProcess::start(&binary, folder.path(), &cluster)?;
    let mut last = begin;
    for it in &mut fleet {
        last = last.max(it.wait_for("synced 2 ")?);
    }
    report.figure("the brain is replaced: until all nodes follow it", (last - begin).as_secs_f64(), "s", 1);
    report.figure("  CPU, start included", brain.cpu()?, "s", 1);
    report.figure("  bytes per node", kilobytes_per_node(&fleet, received), "kB", 1);
    report.figure("  resident at most", brain.resident_mb("VmHWM")?, "MB", 0);
    Ok(report.method(format!(
        "`brain --serve-any-node` with {agents} nodes on this machine, {services} Services of {ENDPOINTS} endpoints; the \
         API server and the nodes are other processes. CPU, memory and bytes are those of the brain; times depend on what \
         else this machine does."
    )))
}

fn others_received(fleet: &[&mut Agents]) -> u64 {
    fleet.iter().map(|it| it.received).sum()
}

/// The clock that all processes share.
fn now() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_MONOTONIC)?.into())
}

/// The cluster, in an API server of this process.
struct Cluster {
    server: ApiServer,
    services: u32,
    nodes: u32,
    changes: std::cell::Cell<u32>,
}

impl Cluster {
    fn start(services: u32, nodes: u32) -> Result<Self> {
        let server =
            ApiServer::start(Settings { bookmark_interval: Duration::from_secs(60), ..Settings::default() })?;
        let cluster = Self { server, services, nodes, changes: std::cell::Cell::new(0) };
        for n in 0..nodes {
            cluster.server.set(json!({
                "apiVersion": "v1", "kind": "Node",
                "metadata": {"name": format!("n{n}"), "labels": {"topology.kubernetes.io/zone": format!("zone-{}", n % 3)}},
                "spec": {"podCIDR": format!("10.{}.{}.0/24", 100 + n / 250, n % 250)},
                "status": {"addresses": [{"type": "InternalIP", "address": format!("10.64.{}.{}", n / 250, 1 + n % 250)}]},
            }));
        }
        for n in 0..=services {
            cluster.server.set(objects::service(n));
            cluster.server.set(objects::slice(n, cluster.endpoints(n)));
        }
        Ok(cluster)
    }

    /// Changes an endpoint of a Service, and waits until all have it.
    fn change(&self, fleet: &mut [&mut Agents], service: u32) -> Result<Duration> {
        let address = self.next_address();
        self.expect(fleet, &address, || self.set_first(service, &address))
    }

    fn set_first(&self, service: u32, address: &str) {
        let mut endpoints = self.endpoints(service);
        endpoints[0] = self.endpoint(service, 0, address);
        self.server.set(objects::slice(service, endpoints));
    }

    /// Replaces all pods of the last Service, one by one.
    fn roll(&self, fleet: &mut [&mut Agents]) -> Result<Duration> {
        let mut endpoints = self.endpoints(self.services);
        for n in 0..ROLLED_PODS - 1 {
            endpoints[n as usize] = self.endpoint(self.services, ROLLED_PODS + n, &self.next_address());
            self.server.set(objects::slice(self.services, endpoints.clone()));
            thread::sleep(Duration::from_secs(1) / ROLLED_PER_SECOND);
        }
        let address = self.next_address();
        endpoints[ROLLED_PODS as usize - 1] = self.endpoint(self.services, 2 * ROLLED_PODS, &address);
        self.expect(fleet, &address, || self.server.set(objects::slice(self.services, endpoints)))
    }

    /// Removes the endpoints of the node that has most.
    fn kill_node(&self, fleet: &mut [&mut Agents]) -> Result<Duration> {
        let address = self.next_address();
        self.expect(fleet, &address, || {
            for n in 0..self.services {
                let mut endpoints = self.endpoints(n);
                let before = endpoints.len();
                endpoints.retain(|it| it["nodeName"] != "n0");
                if endpoints.len() < before {
                    self.server.set(objects::slice(n, endpoints));
                }
            }
            // This one has none on that node.
            self.set_first(1, &address);
        })
    }

    /// From the last change until the last node had it.
    fn expect(&self, fleet: &mut [&mut Agents], address: &str, change: impl FnOnce()) -> Result<Duration> {
        for it in fleet.iter_mut() {
            it.expect(address)?;
        }
        change();
        let begin = now()?;
        let mut last = begin;
        for it in fleet {
            last = last.max(it.wait_for(&format!("seen {address} "))?);
        }
        Ok(last.saturating_sub(begin))
    }

    /// An address that no endpoint has had.
    fn next_address(&self) -> String {
        let n = self.changes.get();
        self.changes.set(n + 1);
        format!("10.250.{}.{}", 100 + n / 100, 100 + n % 100)
    }

    fn endpoints(&self, service: u32) -> Vec<Value> {
        let count = if service == self.services { ROLLED_PODS } else { ENDPOINTS };
        (0..count).map(|it| self.endpoint(service, it, "")).collect()
    }

    fn endpoint(&self, service: u32, number: u32, address: &str) -> Value {
        let id = service * ENDPOINTS + number;
        let node = if id.is_multiple_of(DEAD_SHARE) { 0 } else { id % self.nodes };
        let address = match address {
            "" => objects::address(id).to_string(),
            it => it.to_owned(),
        };
        objects::endpoint(service, number, &address, node)
    }
}

/// The brain; it is killed when dropped.
struct BrainProcess {
    child: KilledOnDrop,
    socket: PathBuf,
}

impl BrainProcess {
    fn start(binary: &Path, folder: &Path, cluster: &Cluster) -> Result<Self> {
        let socket = folder.join("proxy.sock");
        let log = File::options().create(true).append(true).open(folder.join("brain.log"))?;
        let child = Command::new(binary)
            .args(["brain", "--source=kube", "--serve-any-node", "--node-name=n0"])
            .arg(format!("--kube-api-server={}", cluster.server.url()))
            .arg(format!("--listen=unix://{}", socket.display()))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {}", binary.display()))?;
        Ok(Self { child: KilledOnDrop(child), socket })
    }

    /// The CPU time that it has used, in seconds.
    fn cpu(&self) -> Result<f64> {
        cpu_seconds(self.child.0.id())
    }

    fn resident_mb(&self, field: &str) -> Result<f64> {
        memory_mb(self.child.0.id(), field)
    }
}

/// Simulated agents, in a process of their own.
struct Agents {
    child: KilledOnDrop,
    lines: Receiver<String>,
    /// Lines that were read before what was waited for.
    earlier: Vec<String>,
    /// The bytes that they had received by the last line.
    received: u64,
}

impl Agents {
    fn start(example: &Path, socket: &Path, first: u32, end: u32) -> Result<Self> {
        let mut child = Command::new(example)
            .arg(socket)
            .args([first, end].map(|it| it.to_string()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", example.display()))?;
        let output = BufReader::new(child.stdout.take().context("stdout is piped")?);
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|it| sender.send(it)));
        Ok(Self { child: KilledOnDrop(child), lines, earlier: Vec::new(), received: 0 })
    }

    fn expect(&mut self, text: &str) -> Result<()> {
        let input = self.child.0.stdin.as_mut().context("stdin is piped")?;
        writeln!(input, "expect {text}")?;
        let answer = self.take(&format!("expecting {text}"), SYNC_TIMEOUT)?;
        answer.map(drop).context("the agents do not answer")
    }

    /// Waits for a line; when it was written.
    fn wait_for(&mut self, start: &str) -> Result<Duration> {
        self.poll(start, SYNC_TIMEOUT)?.with_context(|| format!("no line {start:?} within {SYNC_TIMEOUT:?}"))
    }

    /// Waits for a line; when it was written, `None` if there is none within `timeout`.
    fn poll(&mut self, start: &str, timeout: Duration) -> Result<Option<Duration>> {
        let Some(rest) = self.take(start, timeout)? else { return Ok(None) };
        let mut numbers = rest.split(' ');
        let mut number =
            || numbers.next().and_then(|it| it.parse::<u64>().ok()).context("a number is missing");
        let at = Duration::from_nanos(number()?);
        self.received = number()?;
        Ok(Some(at))
    }

    /// Waits for a line and takes it; what follows its start, `None` if there is none within `timeout`.
    fn take(&mut self, start: &str, timeout: Duration) -> Result<Option<String>> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(at) = self.earlier.iter().position(|it| it.starts_with(start)) {
                return Ok(Some(self.earlier.remove(at).split_off(start.len())));
            }
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.earlier.push(line),
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => bail!("the agents have ended"),
            }
        }
    }
}
