//! `run`: brain and backend in one process.

use anyhow::{Result, anyhow};
use backend::ebpf::Node;
use clap::Args;

use super::{flags, pipeline::Pipeline, serving::Serving, signals::Signals};

/// Serve this node: brain and backend in one process
///
/// Reads the cluster's facts, decides what this node serves, and keeps the kernel at it until SIGTERM or SIGINT.
/// The kernel goes on serving after that, and the next start takes over without a gap; `cleanup` takes it all away.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    facts: flags::Facts,
    #[command(flatten)]
    data_plane: flags::DataPlane,
    #[command(flatten)]
    listen: flags::Listen,
    #[command(flatten)]
    any_node: flags::AnyNode,
}

pub(super) fn main(flags: Flags) -> Result<()> {
    // One thread is enough: what takes long waits in the kernel, in a thread of its own.
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run(flags))
}

async fn run(flags: Flags) -> Result<()> {
    let mut signals = Signals::new()?;
    // Whatever is wrong with the source or the addresses is found before the kernel is touched.
    let pipeline = Pipeline::start(&flags.facts)?;
    let served = pipeline.served(flags.any_node.serve_any_node);
    let listen = &flags.listen;
    let mut serving = Serving::start(&listen.listen, &listen.tls, served, &pipeline.subscribe()).await?;
    let options = flags.data_plane.options();
    let node = tokio::task::spawn_blocking(move || Node::start(&options)).await??;
    let result = tokio::select! {
        () = backend::follow(node, pipeline.subscribe()) => Err(anyhow!("nothing is published any more")),
        () = pipeline.publish() => Err(anyhow!("the source has ended; the log says why")),
        result = serving.ended() => result,
        () = signals.terminated() => Ok(()),
    };
    drop(pipeline);
    serving.stop().await;
    tracing::info!("stopping; the kernel goes on serving the last state (`cleanup` would end that)");
    result
}
