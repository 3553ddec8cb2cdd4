//! `cargo xtask bench nft`: what the nftables backend costs, by the number of Services.
//! The one rule: each size in a process and a network namespace of its own.

use std::process::Command;

use anyhow::{Context as _, Result};
use serde::Deserialize;

use crate::Report;
use build_tools::command::{cargo, output, run, status, workspace};

const ENDPOINTS: u32 = 2;
const CHANGES: u32 = 100;
/// Seconds for which clients keep their endpoints, where they do.
const AFFINITY: u32 = 10_800;

/// What a size was measured to cost.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Figures {
    load_ms: f64,
    one_service_ms: f64,
    one_endpoint_ms: f64,
    restart_ms: f64,
}

/// Measures, and fails if a goal is missed.
pub(crate) fn nft() -> Result<()> {
    let mut build = cargo();
    build.args(["build", "--release", "--package", "backend", "--example", "bench_nft", "--target-dir"]);
    run(build.arg(workspace().join("target")))?;
    let small = measure(1_000, 0)?;
    let large = measure(10_000, 0)?;
    let sticky = measure(10_000, AFFINITY)?;

    let mut report = Report::new("CASE, 2 ENDPOINTS EACH");
    report.row("10k services: first load", 2_000.0, large.load_ms, "ms", 0);
    report.row("10k services: one more service", 10.0, large.one_service_ms, "ms", 2);
    let ratio = large.one_service_ms / small.one_service_ms;
    report.row("  as a multiple of that at 1k services", 2.0, ratio, "x", 2);
    report.row("10k services: one endpoint more", 10.0, large.one_endpoint_ms, "ms", 2);
    let ratio = large.one_endpoint_ms / small.one_endpoint_ms;
    report.row("  as a multiple of that at 1k services", 2.0, ratio, "x", 2);
    report.row("10k services: restart, nothing has changed", 2_000.0, large.restart_ms, "ms", 0);
    report.row("  with session affinity: first load", 2_000.0, sticky.load_ms, "ms", 0);
    report.row("  with session affinity: one more service", 10.0, sticky.one_service_ms, "ms", 2);
    report.row("  with session affinity: one endpoint more", 10.0, sticky.one_endpoint_ms, "ms", 2);
    report.row("  with session affinity: restart", 2_000.0, sticky.restart_ms, "ms", 0);
    report.print(&format!(
        "From a state in hand to packets that obey it, in real time; the median of {CHANGES} changes of a kind."
    ))
}

fn measure(services: u32, affinity: u32) -> Result<Figures> {
    let how = if affinity > 0 { ", with session affinity" } else { "" };
    status("Measuring", &format!("{services} services of {ENDPOINTS} endpoints{how}"));
    let mut command = Command::new(workspace().join("target/release/examples/bench_nft"));
    command.args([services, ENDPOINTS, CHANGES, affinity].map(|it| it.to_string()));
    serde_json::from_str(&output(&mut command)?).context("the bench printed something else than figures")
}
