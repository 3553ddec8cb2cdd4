//! `run`: brain and backend in one process.

use std::sync::Arc;

use admin::{Admin, Role};
use anyhow::{Result, anyhow};
use clap::Args;
use publish::grpc::{CountedNodes, ServedData};

use super::{
    block_on, config, events, flags, packets, pipeline::Pipeline, plane, serving::Serving, signals::Signals,
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
    _config: config::ConfigFile,
    #[command(flatten)]
    data_plane: flags::DataPlane,
    #[command(flatten)]
    packets: packets::PacketFlags,
    #[command(flatten)]
    listen: flags::Listen,
    #[command(flatten)]
    any_node: flags::ServeAnyNode,
    #[command(flatten)]
    reports: flags::Reports,
}

pub(super) fn main(flags: Flags) -> Result<()> {
    block_on(run(flags))
}

async fn run(flags: Flags) -> Result<()> {
    let mut signals = Signals::new()?;
    // Whatever is wrong with the source or the addresses is found before the kernel is touched.
    let pipeline = Pipeline::start(&flags.facts)?;
    let served = pipeline.served(flags.any_node.serve_any_node);
    let admin = Admin::new(pipeline.node(), Role::Serves);
    let health_checks = flags.data_plane.health_checks(&admin, pipeline.node())?;
    let health_checks = events::post(health_checks, &flags.facts, pipeline.node());
    let options = flags.packets.options(flags.data_plane.options(pipeline.node())?)?;
    let counted = CountedNodes::new(served.nodes);
    admin.watchers(counted.watchers());
    let served = ServedData { nodes: Arc::new(counted), ..served };
    let listen = &flags.listen;
    let mut serving = Serving::start(&listen.listen, &listen.tls, served, &pipeline.subscribe()).await?;
    let _reports = flags.reports.serve(&admin);
    let kept = plane::keep(options, health_checks, || pipeline.subscribe(), &admin);
    let result = tokio::select! {
        kept = kept => kept.and_then(|()| Err(anyhow!("nothing is published any more"))),
        () = admin.follow(pipeline.subscribe()) => Err(anyhow!("nothing is published any more")),
        () = pipeline.publish(Some(&admin)) => Err(anyhow!("the source has ended; the log says why")),
        result = serving.ended() => result,
        () = signals.terminated() => Ok(()),
    };
    drop(pipeline);
    serving.stop().await;
    tracing::info!("stopping; the kernel goes on serving the last state (`cleanup` would end that)");
    result
}
