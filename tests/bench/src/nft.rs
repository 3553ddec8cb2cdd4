//! `cargo xtask bench nft`: the cost of the nftables path, by the number of Services.
//! Invariant: each size is measured in a process and a network namespace of its own.

use anyhow::{Context as _, Result};
use build_tools::command::status;
use serde::Deserialize;

use crate::{example, figures::Figures};

const ENDPOINTS: u32 = 2;
/// Numbers of Services.
const SIZES: [u32; 4] = [100, 1_000, 10_000, 30_000];
const CHANGES: u32 = 100;
/// The timeout of session affinity, in seconds.
const AFFINITY: u32 = 10_800;

/// The names of series, in milliseconds by the number of Services.
pub(crate) const SERVICE: &str = "one more Service";
pub(crate) const ENDPOINT: &str = "one more endpoint";
pub(crate) const LOAD: &str = "first load";

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct NftFigures {
    load_ms: f64,
    one_service_ms: f64,
    one_endpoint_ms: f64,
    source_ranges_ms: f64,
    restart_ms: f64,
}

pub(crate) fn bench() -> Result<Figures> {
    example::build("datapath-nft", "bench_nft")?;
    let mut sizes = Vec::new();
    for services in SIZES {
        sizes.push((services, measure(services, 0)?));
    }
    let of = |services| sizes.iter().find(|it| it.0 == services).map(|it| it.1).context("it was measured");
    let (small, large) = (of(1_000)?, of(10_000)?);
    let sticky = measure(10_000, AFFINITY)?;

    let mut report = Figures::new("CASE, 2 ENDPOINTS EACH");
    report.row("10k services: first load", 2_000.0, large.load_ms, "ms", 0);
    report.row("10k services: one more service", 10.0, large.one_service_ms, "ms", 2);
    let ratio = large.one_service_ms / small.one_service_ms;
    report.row("  as a multiple of that at 1k services", 2.0, ratio, "x", 2);
    report.row("10k services: one more endpoint", 10.0, large.one_endpoint_ms, "ms", 2);
    let ratio = large.one_endpoint_ms / small.one_endpoint_ms;
    report.row("  as a multiple of that at 1k services", 2.0, ratio, "x", 2);
    report.row("10k services: 100 ports x 1,000 source ranges", 100.0, large.source_ranges_ms, "ms", 1);
    report.row("10k services: restart without changes", 2_000.0, large.restart_ms, "ms", 0);
    report.row("  with session affinity: first load", 2_000.0, sticky.load_ms, "ms", 0);
    report.row("  with session affinity: one more service", 10.0, sticky.one_service_ms, "ms", 2);
    report.row("  with session affinity: one more endpoint", 10.0, sticky.one_endpoint_ms, "ms", 2);
    report.row("  with session affinity: restart", 2_000.0, sticky.restart_ms, "ms", 0);
    let by_services = |figure: fn(&NftFigures) -> f64| -> Vec<(f64, f64)> {
        sizes.iter().map(|(services, it)| (f64::from(*services), figure(it))).collect()
    };
    report.series(SERVICE, by_services(|it| it.one_service_ms));
    report.series(ENDPOINT, by_services(|it| it.one_endpoint_ms));
    report.series(LOAD, by_services(|it| it.load_ms));
    Ok(report.method(format!(
        "From a received state until it applies to packets, in wall-clock time; the median of {CHANGES} changes of a kind."
    )))
}

fn measure(services: u32, affinity: u32) -> Result<NftFigures> {
    let suffix = if affinity > 0 { ", with session affinity" } else { "" };
    status("Measuring", &format!("{services} services of {ENDPOINTS} endpoints{suffix}"));
    example::measure("bench_nft", &[services, ENDPOINTS, CHANGES, affinity])
}
