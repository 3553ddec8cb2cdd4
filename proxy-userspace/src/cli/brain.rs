//! `brain`: decides, and lets others do.

use std::sync::Arc;

use admin::{Admin, Role};
use anyhow::{Result, anyhow};
use clap::Args;
use publish::grpc::{CountedNodes, ServedData};

use super::{block_on, config, flags, pipeline::Pipeline, serving::Serving, signals::Signals};

/// Decide what this node serves and tell others, without touching a kernel
///
/// Reads the cluster's facts and serves the node's state over gRPC to `agent`, to `print --target`, and to any backend
/// written for KPNG, until SIGTERM or SIGINT. A client never gets a partial state: nothing is said before all is known.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    facts: flags::Facts,
    #[command(flatten)]
    _config: config::ConfigFile,
    #[command(flatten)]
    serve: flags::Serve,
    #[command(flatten)]
    any_node: flags::ServeAnyNode,
    #[command(flatten)]
    reports: flags::BrainReports,
}

pub(super) fn main(flags: &Flags) -> Result<()> {
    block_on(brain(flags))
}

async fn brain(flags: &Flags) -> Result<()> {
    let mut signals = Signals::new()?;
    let serve = &flags.serve;
    let mut pipeline = Pipeline::start(&flags.facts)?;
    if flags.any_node.serve_any_node {
        pipeline.serve_others();
    }
    let served = pipeline.served(flags.any_node.serve_any_node);
    let admin = Admin::new(pipeline.node(), Role::Decides);
    let counted = CountedNodes::new(served.nodes);
    admin.watchers(counted.watchers());
    let served = ServedData { nodes: Arc::new(counted), ..served };
    let mut serving = Serving::start(&serve.listen, &serve.tls, served, &pipeline.subscribe()).await?;
    let _reports = flags.reports.serve(&admin);
    let result = tokio::select! {
        () = admin.follow(pipeline.subscribe()) => Err(anyhow!("nothing is published any more")),
        () = pipeline.publish(Some(&admin)) => Err(anyhow!("the source has ended; the log says why")),
        result = serving.ended() => result,
        () = signals.terminated() => Ok(()),
    };
    drop(pipeline);
    serving.stop().await;
    tracing::info!("stopping; those who follow keep their last state");
    result
}
