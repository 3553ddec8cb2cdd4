//! `cargo xtask bench brain`: CPU and memory of the brain, alone and as a server of many nodes.

use anyhow::Result;
use build_tools::command::status;
use serde::{Deserialize, de::DeserializeOwned};

use crate::{
    example,
    figures::{Figures, TEN_EACH},
};

/// How many nodes follow it, for the series.
const NODES: [u32; 3] = [10, 100, 1_000];
/// The names of series, by the number of nodes.
pub(crate) const CPU: &str = "CPU of a change, in ms";
pub(crate) const MEMORY: &str = "resident, in MB";
pub(crate) const LATENCY: &str = "until the last node has a change, in ms";

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct BrainFigures {
    first_state_ms: f64,
    change_mean_us: f64,
    change_median_us: f64,
    resident_mb: f64,
    further_node_kb: f64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ServerFigures {
    change_cpu_ms: f64,
    worst_wall_ms: f64,
    resident_mb: f64,
    further_watcher_kb: f64,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    services: u32,
    nodes: u32,
    watched: u32,
    changes: u32,
}

impl Case {
    const ENDPOINTS: u32 = 10;

    /// The brain alone.
    fn measure(self) -> Result<BrainFigures> {
        self.run("bench", "watched", &[])
    }

    /// The brain, and the server for its watchers, with `streams` of them per connection.
    fn serve(self, streams: u32) -> Result<ServerFigures> {
        self.run("serving", "served", &[streams])
    }

    fn run<T: DeserializeOwned>(self, example: &str, verb: &str, more: &[u32]) -> Result<T> {
        let Self { services, nodes, watched, changes } = self;
        let endpoints = Self::ENDPOINTS;
        status("Measuring", &format!("{services} services of {endpoints} endpoints, {watched} nodes {verb}"));
        example::measure(example, &[&[services, endpoints, nodes, watched, changes], more].concat())
    }
}

pub(crate) fn bench() -> Result<Figures> {
    example::build(&[("brain", "bench"), ("grpc-server", "serving")])?;

    let one = Case { services: 10_000, nodes: 20, watched: 1, changes: 500 };
    let large = one.measure()?;
    let small = Case { services: 1_000, ..one }.measure()?;
    let many = Case { services: 5_000, watched: 20, ..one }.measure()?;
    let many_served = Case { services: 5_000, watched: 20, ..one }.serve(1)?;
    let crowd = Case { services: 2_000, nodes: 1_000, watched: 1_000, changes: 100 };
    let crowd_served = Case { changes: 20, ..crowd }.serve(10)?;
    let crowd_apart = Case { changes: 20, ..crowd }.serve(1)?;
    let crowd = crowd.measure()?;
    let ratio = large.change_median_us / small.change_median_us;

    let (mut cpu, mut memory, mut latency) = (Vec::new(), Vec::new(), Vec::new());
    for nodes in NODES {
        let it = Case { services: 2_000, nodes, watched: nodes, changes: 20 }.serve(1)?;
        let nodes = f64::from(nodes);
        cpu.push((nodes, it.change_cpu_ms));
        memory.push((nodes, it.resident_mb));
        latency.push((nodes, it.worst_wall_ms));
    }

    let mut report = Figures::new(TEN_EACH);
    report.series(CPU, cpu);
    report.series(MEMORY, memory);
    report.series(LATENCY, latency);
    report.row("10k services, 1 node: first full state", 300.0, large.first_state_ms, "ms", 1);
    report.row("10k services, 1 node: one endpoint changes", 0.2, large.change_mean_us / 1e3, "ms", 3);
    report.row("  the median, as a multiple of that at 1k services", 1.5, ratio, "x", 2);
    report.row("10k services, 1 node: resident", 100.0, large.resident_mb, "MB", 0);
    report.row("5k services, 20 nodes: one endpoint changes", 2.0, many.change_mean_us / 1e3, "ms", 3);
    report.row("5k services, 20 nodes: resident", 150.0, many.resident_mb, "MB", 0);
    let change = crowd.change_mean_us / 1e3;
    report.row("2k services, 1,000 nodes: one endpoint changes", 1_000.0, change, "ms", 3);
    report.row("2k services, 1,000 nodes: memory per further node", 50.0, crowd.further_node_kb, "kB", 1);
    report.row("5k services, 20 nodes served: one endpoint changes", 2.0, many_served.change_cpu_ms, "ms", 3);
    report.row("5k services, 20 nodes served: resident", 150.0, many_served.resident_mb, "MB", 0);
    let last = crowd_served.worst_wall_ms;
    report.row("2k services, 1,000 nodes served: until the last node has a change", 1_000.0, last, "ms", 0);
    let case = "2k services, 1,000 nodes served: memory per further watcher, 10 per connection";
    report.row(case, 50.0, crowd_served.further_watcher_kb, "kB", 1);
    report.figure("  one per connection", crowd_apart.further_watcher_kb, "kB", 1);
    Ok(report.method(
        "The brain alone with cold caches, and as a gRPC server. CPU and memory are those of the process; only the time \
         until the last node has a change depends on other load on this machine.",
    ))
}
