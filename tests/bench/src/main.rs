//! `cargo xtask bench`: what things cost, as figures beside the goals.
//! The one rule: measured, each case in a process of its own; nothing is estimated.

mod apply;
mod connect;
mod kube;
mod nft;

use anyhow::{Context as _, Result, bail};
use clap::{Parser, ValueEnum};
use comfy_table::{Table, presets};
use serde::{Deserialize, de::DeserializeOwned};

use std::process::ExitCode;

use build_tools::command::{cargo, output, run, status, workspace};

/// What can be measured.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Subject {
    /// Applying: from a state in hand to what every program sees; a start; and the memory that it takes (as root).
    Apply,
    /// The brain: CPU and memory, from facts to the states of nodes.
    Brain,
    /// Connecting: through a Service's address and straight to an endpoint, as pairs; and the programs' own time (as root).
    Connect,
    /// An API server as the source: memory and CPU of `run`, at 10k Services and 500 changes a second (as root).
    Kube,
    /// Packets by nftables: loads, changes and restarts at 1k and 10k Services (as root).
    Nft,
}

/// What one case was measured to cost.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Figures {
    first_state_ms: f64,
    change_mean_us: f64,
    change_median_us: f64,
    resident_mb: f64,
    further_node_kb: f64,
}

/// What it was measured to cost to serve.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ServedFigures {
    change_cpu_ms: f64,
    worst_wall_ms: f64,
    resident_mb: f64,
    further_watcher_kb: f64,
}

/// A made-up cluster.
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
    fn measure(self) -> Result<Figures> {
        self.run("bench", "watched", &[])
    }

    /// The brain and all that it takes to serve its watchers, so many of them to a connection.
    fn serve(self, streams: u32) -> Result<ServedFigures> {
        self.run("serving", "served", &[streams])
    }

    /// Runs the case in a process of its own.
    fn run<T: DeserializeOwned>(self, example: &str, how: &str, more: &[u32]) -> Result<T> {
        let Self { services, nodes, watched, changes } = self;
        let endpoints = Self::ENDPOINTS;
        status("Measuring", &format!("{services} services of {endpoints} endpoints, {watched} nodes {how}"));
        let mut command =
            std::process::Command::new(workspace().join("target/release/examples").join(example));
        let numbers = [services, endpoints, nodes, watched, changes];
        command.args(numbers.iter().chain(more).map(u32::to_string));
        serde_json::from_str(&output(&mut command)?).context("the bench printed something else than figures")
    }
}

/// Measure what things cost, and print the figures beside the goals.
#[derive(Parser)]
#[command(bin_name = "cargo xtask bench", max_term_width = 100)]
struct Arguments {
    /// What to measure.
    subject: Subject,
}

fn main() -> ExitCode {
    match bench(Arguments::parse().subject) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Measures, and fails if a goal is missed.
fn bench(subject: Subject) -> Result<()> {
    match subject {
        Subject::Apply => apply::apply(),
        Subject::Brain => brain(),
        Subject::Connect => connect::connect(),
        Subject::Kube => kube::kube(),
        Subject::Nft => nft::nft(),
    }
}

fn brain() -> Result<()> {
    let mut build = cargo();
    build.args(["build", "--release", "--package", "brain", "--package", "publish"]);
    build.args(["--example", "bench", "--example", "serving", "--target-dir"]);
    run(build.arg(workspace().join("target")))?;

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

    let mut report = Report::new(TEN_EACH);
    report.row("10k services, 1 node: first full state", 300.0, large.first_state_ms, "ms", 1);
    report.row("10k services, 1 node: one endpoint changes", 0.2, large.change_mean_us / 1e3, "ms", 3);
    report.row("  the median, as a multiple of that at 1k services", 1.5, ratio, "x", 2);
    report.row("10k services, 1 node: resident", 100.0, large.resident_mb, "MB", 0);
    report.row("5k services, 20 nodes: one endpoint changes", 2.0, many.change_mean_us / 1e3, "ms", 3);
    report.row("5k services, 20 nodes: resident", 150.0, many.resident_mb, "MB", 0);
    report.row(
        "2k services, 1,000 nodes: one endpoint changes",
        1_000.0,
        crowd.change_mean_us / 1e3,
        "ms",
        3,
    );
    report.row("2k services, 1,000 nodes: memory per further node", 50.0, crowd.further_node_kb, "kB", 1);
    report.row("5k services, 20 nodes served: one endpoint changes", 2.0, many_served.change_cpu_ms, "ms", 3);
    report.row("5k services, 20 nodes served: resident", 150.0, many_served.resident_mb, "MB", 0);
    report.row(
        "2k services, 1,000 nodes served: the last one has a change after (at worst)",
        1_000.0,
        crowd_served.worst_wall_ms,
        "ms",
        0,
    );
    report.row(
        "2k services, 1,000 nodes served: memory per further watcher, 10 to a connection",
        50.0,
        crowd_served.further_watcher_kb,
        "kB",
        1,
    );
    report.figure("  each with a connection of its own", crowd_apart.further_watcher_kb, "kB", 1);
    report.print(
        "The brain alone with cold caches, and served over gRPC. CPU and memory are the process's own; only the time until \
         the last one has a change depends on what else runs here.",
    )
}

/// What a table of figures is about, mostly.
const TEN_EACH: &str = "CASE, 10 ENDPOINTS EACH";

/// Figures beside their goals.
struct Report {
    table: Table,
    missed: usize,
}

impl Report {
    fn new(what: &str) -> Self {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        table.set_header([what, "GOAL", "MEASURED", ""]);
        Self { table, missed: 0 }
    }

    /// Adds a figure that should not be above `goal`.
    fn row(&mut self, case: &str, goal: f64, measured: f64, unit: &str, digits: usize) {
        let is_met = measured <= goal;
        self.missed += usize::from(!is_met);
        self.table.add_row([
            case.to_owned(),
            format!("<= {goal} {unit}"),
            format!("{measured:.digits$} {unit}"),
            if is_met { "ok" } else { "MISSED" }.to_owned(),
        ]);
    }

    /// Adds a figure that has no goal of its own.
    fn figure(&mut self, case: &str, measured: f64, unit: &str, digits: usize) {
        self.table.add_row([case, "", &format!("{measured:.digits$} {unit}"), ""]);
    }

    fn print(&self, what: &str) -> Result<()> {
        println!("\n{what}\n");
        for line in self.table.lines() {
            println!("{}", line.trim_end());
        }
        match self.missed {
            0 => Ok(()),
            missed => bail!("{missed} goals were missed; is the machine busy?"),
        }
    }
}
