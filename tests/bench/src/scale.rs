//! `cargo xtask bench scale`: a change of one endpoint, as a client sees it, while a large cluster replaces 50 pods per second.
//! Invariant: the Service that changes is none of those that are churned; what it waits for is their cost.

use std::{
    fmt, fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::Path,
    str::FromStr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use api_server::{ApiServer, Settings, WatchList};
use build_tools::{build, command::status};
use clap::Args;
use fastrand::Rng;
use serde_json::Value;
use tests::{
    MemoryCgroup, Sandbox, TestNode,
    agent::{AgentCommand, VERBOSE},
    test_node::NODE,
};

use crate::{
    figures::{Figures, milliseconds, percentiles},
    kernel_figures::{cpu_seconds, memory_mb},
    objects::{self, TARGET_PORT},
    proxies::{POLL_INTERVAL, is_served, reached, set_changing, wait_until_idle},
};

/// The switch that --rcu-expedited names.
const SWITCH: &str = "/sys/kernel/rcu_expedited";
/// What is measured unless other sizes are given.
const SIZES: [Size; 5] = [
    Size::new(10_000, 10),
    Size::new(10_000, 100),
    Size::new(50_000, 5),
    Size::new(1, 10_000),
    // Nearly as many as a namespace may have; of more the Service is not served.
    Size { services: 1, endpoints: 100, ports: 3_100 },
];
/// The most endpoints of a slice, as the controller of Kubernetes makes them.
const SLICE: u32 = 100;
const PODS_PER_SECOND: u32 = 50;
/// Of a Service with many ports, whose slices are as large as many others.
const PODS_PER_SECOND_OF_MANY_PORTS: u32 = 1;
const CHANGES: u32 = 200;
const CHANGE_INTERVAL: Duration = Duration::from_millis(97);
const START_TIMEOUT: Duration = Duration::from_secs(300);
const CHANGE_TIMEOUT: Duration = Duration::from_secs(60);
/// The Service that changes has one endpoint, at one of these.
const CHANGING: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 244, 1, 1), Ipv4Addr::new(10, 244, 1, 2)];

/// What `bench scale` measures.
#[derive(Clone, Debug, Args)]
pub(crate) struct ScaleArguments {
    /// Sizes of the cluster: Services, endpoints of each, and ports of each if not one
    #[arg(long, value_name = "SERVICESxENDPOINTS[xPORTS]", value_delimiter = ',', default_values_t = SIZES)]
    sizes: Vec<Size>,
    /// Measure only with this value of `--packets`
    #[arg(long, value_name = "off|nft")]
    packets: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size {
    services: u32,
    /// Of each Service.
    endpoints: u32,
    /// Of each Service.
    ports: u32,
}

impl Size {
    /// Of Services with one port.
    const fn new(services: u32, endpoints: u32) -> Self {
        Self { services, endpoints, ports: 1 }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.services, self.endpoints)?;
        if self.ports > 1 { write!(f, "x{}", self.ports) } else { Ok(()) }
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Option<Vec<u32>> = text.split('x').map(|it| it.parse().ok()).collect();
        let size = match numbers.as_deref() {
            Some(&[services, endpoints]) => Some(Self::new(services, endpoints)),
            Some(&[services, endpoints, ports]) => Some(Self { services, endpoints, ports }),
            _ => None,
        };
        let is_possible = |it: &Self| {
            (1..=50_000).contains(&it.services)
                && it.endpoints > 0
                && it.services.saturating_mul(it.endpoints) <= 7_500_000
                && (1..=20_000).contains(&it.ports)
        };
        size.filter(is_possible).ok_or_else(|| {
            "write 10000x10, or 1x100x10000; at most 50,000 Services, 7.5 million endpoints and 20,000 ports".into()
        })
    }
}

#[derive(Clone, Copy, Debug)]
struct Goals {
    p99_ms: f64,
    resident_mb: f64,
    peak_mb: f64,
}

fn goals(size: Size) -> Goals {
    let (resident_mb, peak_mb) = match (size.services, size.endpoints) {
        (10_000, 10) => (150.0, 180.0),
        (10_000, 100) => (500.0, 500.0),
        (50_000, 5) => (450.0, 450.0),
        _ if size.ports > 1 => (300.0, 500.0),
        _ => (100.0, 120.0),
    };
    let p99_ms = if size.ports > 1 { 50.0 } else { 5.0 };
    Goals { p99_ms, resident_mb, peak_mb }
}

pub(crate) fn bench(arguments: &ScaleArguments) -> Result<Figures> {
    let binary = build::build(true)?;
    ensure!(
        fs::read_to_string(SWITCH).map_or(true, |it| it.trim() == "0"),
        "{SWITCH} is set: write 0 to it, as most machines have it"
    );
    let mut report = Figures::new("SERVICES x ENDPOINTS");
    let all_packets = || {
        ["off", "nft"].into_iter().filter(|it| arguments.packets.as_deref().is_none_or(|only| only == *it))
    };
    for &size in &arguments.sizes {
        for packets in all_packets() {
            measure(&binary, size, packets, None, &mut report)?;
        }
    }
    if let Some(&size) = arguments.sizes.first() {
        for packets in all_packets() {
            measure(&binary, size, packets, Some("--rcu-expedited="), &mut report)?;
        }
    }
    Ok(report.method(
        "One endpoint of one Service changes 10 times per second, and a client connects until it reaches the new one, while 50 of the \
         other endpoints per second are replaced, or one, if each has thousands of ports. The API server is a part of the benchmark, on the same machine. With --rcu-expedited= a change waits for a grace period of the kernel after the one before; else it is shortened.",
    ))
}

fn measure(binary: &Path, size: Size, packets: &str, flag: Option<&str>, report: &mut Figures) -> Result<()> {
    let mut case = format!("{size}, --packets {packets}");
    case.extend(flag.map(|it| format!(" {it}")));
    status("Measuring", &case);
    let node = TestNode::enter(Sandbox::new("bench-scale")?)?;
    let sandbox = node.sandbox();
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, TARGET_PORT))?;
    listener.set_nonblocking(true)?;
    let cluster = Cluster::start(size)?;
    let memory = MemoryCgroup::new(sandbox).ok();

    let changing: SocketAddr = (objects::cluster_ip(0), 80).into();
    let begin = Instant::now();
    let mut command = AgentCommand::kube(binary, sandbox, &cluster.server.url(), NODE)
        .args(["--packets", packets])
        .args(flag)
        .env(VERBOSE, "0");
    if let Some(memory) = &memory {
        command = command.memory_cgroup(memory);
    }
    let mut agent = command.start(sandbox)?;
    agent.wait_until(START_TIMEOUT, || is_served(changing))?;
    let start = begin.elapsed();
    // It goes on loading after it has begun to serve.
    let pid = agent.pid();
    let is_idle = wait_until_idle(START_TIMEOUT, || cpu_seconds(pid))?;
    ensure!(is_idle, "the proxy is not idle after {START_TIMEOUT:?}\n{}", agent.log());

    let (start_cpu, began) = (cpu_seconds(pid)?, Instant::now());
    let times = cluster.churn(|| {
        (0..CHANGES)
            .map(|n| {
                let changed = Instant::now();
                let expected = set_changing(&cluster.server, CHANGING, n);
                while reached(&listener, changing) != Some(expected) {
                    if changed.elapsed() > CHANGE_TIMEOUT {
                        bail!("a change is not served after {CHANGE_TIMEOUT:?}\n{}", agent.log());
                    }
                    thread::sleep(POLL_INTERVAL);
                }
                let took = changed.elapsed();
                thread::sleep(CHANGE_INTERVAL.saturating_sub(took));
                Ok(milliseconds(took))
            })
            .collect::<Result<Vec<_>>>()
    })?;
    let cpu_percent = (cpu_seconds(pid)? - start_cpu) / began.elapsed().as_secs_f64() * 100.0;
    let times = percentiles(times);

    let goals = goals(size);
    report.figure(&format!("{case}: a connect sees a change, median"), times(50), "ms", 1);
    report.row("  99th percentile", goals.p99_ms, times(99), "ms", 1);
    report.row("  CPU, of one core", 10.0, cpu_percent, "%", 1);
    report.row("  resident", goals.resident_mb, memory_mb(pid, "VmRSS")?, "MB", 0);
    report.row("  at most", goals.peak_mb, memory_mb(pid, "VmHWM")?, "MB", 0);
    if let Some(peak) = memory.as_ref().and_then(|it| it.peak().ok()) {
        let peak = peak as f64 / f64::from(1 << 20);
        report.figure("  of its cgroup at most, the kernel's included", peak, "MB", 0);
    }
    report.figure("  from exec until the Service is served", start.as_secs_f64(), "s", 1);
    report.row("  CPU of the start", 10.0, start_cpu, "s", 1);
    agent.terminate()?;
    Ok(())
}

/// An API server with a cluster of a size.
struct Cluster {
    size: Size,
    server: ApiServer,
}

impl Cluster {
    fn start(size: Size) -> Result<Self> {
        let server = ApiServer::start(Settings {
            watch_list: WatchList::Supported,
            bookmark_interval: Duration::from_secs(60),
            ..Settings::default()
        })?;
        let cluster = Self { size, server };
        for n in 0..=size.services {
            let ports = if n > 0 { size.ports } else { 1 };
            cluster.server.set(objects::with_ports(objects::service(n), "/spec/ports", ports));
        }
        set_changing(&cluster.server, CHANGING, 1);
        for service in 1..=size.services {
            for part in 0..size.endpoints.div_ceil(SLICE) {
                cluster.server.set(cluster.slice(service, part, None));
            }
        }
        Ok(cluster)
    }

    /// A part of the endpoints of a Service; of a replaced one the edition is in its name and its address.
    fn slice(&self, service: u32, part: u32, replaced: Option<(u32, u32)>) -> Value {
        let first = part * SLICE;
        let endpoint = |n: u32| {
            let edition = replaced.filter(|(number, _)| *number == n).map_or(0, |(_, edition)| edition);
            // Those of other editions are beyond all others.
            let id = if edition > 0 { 8_000_000 - edition } else { (service - 1) * self.size.endpoints + n };
            let name = if edition > 0 { self.size.endpoints + edition } else { n };
            objects::endpoint(service, name, &objects::address(id).to_string(), n % 1_000)
        };
        let endpoints = (first..self.size.endpoints.min(first + SLICE)).map(endpoint).collect();
        objects::with_ports(objects::slice_of(service, part, endpoints), "/ports", self.size.ports)
    }

    /// Replaces endpoints while `work` is done.
    fn churn<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            let churning = scope.spawn(|| {
                let (mut rng, begin) = (Rng::with_seed(1), Instant::now());
                let rate = if self.size.ports > 1 { PODS_PER_SECOND_OF_MANY_PORTS } else { PODS_PER_SECOND };
                for edition in 1.. {
                    thread::sleep(
                        (begin + Duration::from_secs(1) * edition / rate)
                            .saturating_duration_since(Instant::now()),
                    );
                    if is_done.load(Ordering::Relaxed) {
                        break;
                    }
                    let (service, endpoint) =
                        (rng.u32(1..=self.size.services), rng.u32(0..self.size.endpoints));
                    self.server.set(self.slice(service, endpoint / SLICE, Some((endpoint, edition))));
                }
            });
            let result = work();
            is_done.store(true, Ordering::Relaxed);
            churning.join().ok().context("the thread that replaces endpoints panicked")?;
            result
        })
    }
}
