//! `run`: brain and backend in one process.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use backend::ebpf::{self, Node};
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::{
    flags::{self, absolute},
    pipeline::Pipeline,
};

/// Serve this node: brain and backend in one process
///
/// Reads the cluster's facts, decides what this node serves, and keeps the kernel at it until SIGTERM or SIGINT.
/// The kernel goes on serving after that, and the next start takes over without a gap; `cleanup` takes it all away.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    facts: flags::Facts,
    #[command(flatten)]
    pins: flags::Pins,
    /// The cgroup2 folder whose processes are served, with all below it [default: the root of the first cgroup2 mount]
    #[arg(long, value_name = "PATH", env = "KUBE_PROXY_EBPF_CGROUP", value_parser = absolute)]
    cgroup: Option<PathBuf>,
}

pub(super) fn main(flags: Flags) -> Result<()> {
    // One thread is enough: what takes long waits in the kernel, in a thread of its own.
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run(flags))
}

async fn run(flags: Flags) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be waited for")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be waited for")?;
    // Whatever is wrong with the source is found before the kernel is touched.
    let pipeline = Pipeline::start(&flags.facts)?;
    let options = ebpf::Options { cgroup: flags.cgroup, pin_dir: flags.pins.pin_dir };
    let node = tokio::task::spawn_blocking(move || Node::start(&options)).await??;
    tokio::select! {
        () = backend::follow(node, pipeline.subscribe()) => bail!("nothing is published any more"),
        () = pipeline.publish() => bail!("the source has ended; the log says why"),
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("stopping; the kernel goes on serving the last state (`cleanup` would end that)");
    Ok(())
}
