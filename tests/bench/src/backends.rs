//! `cargo xtask bench backends`: the backends on the contract follow a brain of ours, one at a time.
//! Invariant: what is measured, and how, is that of `bench proxies`; only the brain lies between the API server and a backend.

use anyhow::Result;
use build_tools::{build, command::status, programs::find_or_install};
use clap::Args;

use crate::{figures::Figures, proxies::measure, proxy_command::Proxy, proxy_figures::SizeFigures};

const CHANGES: usize = 100;

/// What `bench backends` measures.
#[derive(Clone, Debug, Args)]
pub(crate) struct BackendsArguments {
    /// The number of Services
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(2..=60_000))]
    services: u32,
    /// The number of endpoints of each Service
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    endpoints: u32,
}

pub(crate) fn bench(arguments: &BackendsArguments) -> Result<Figures> {
    let &BackendsArguments { services, endpoints } = arguments;
    let (own, folder) = (build::build(true)?, build::build_backends(true)?);
    find_or_install("iptables-nft-restore", "iptables")?;
    let mut report = Figures::new("");
    for backend in Proxy::backends(&own, &folder) {
        let measured = if let Some(reason) = backend.unavailable() {
            status("Skipped", &format!("{}: {reason}", backend.name));
            SizeFigures { failure: Some(reason.into()), ..SizeFigures::default() }
        } else {
            measure(&backend, services, endpoints, |bench, figures| bench.measure(CHANGES, figures))
        };
        report.proxies.entry(backend.name).or_default().insert(services, measured);
    }
    Ok(report.method(format!(
        "Each Service has {endpoints} endpoints, the changing one has one. A brain follows the API server; CPU and memory are those \
         of the backend alone, with the programs that it starts."
    )))
}
