//! `brain`: computes node states and serves them to other processes.

use std::sync::Arc;

use admin::{Admin, Role};
use anyhow::{Result, anyhow};
use clap::Args;
use pipeline::Pipeline;
use publish::grpc::{CountedNodes, ServedData};

use super::{
    admin_observer::AdminObserver,
    config,
    flags::{AnyNodeFlags, BrainReportFlags, ServeFlags, SourceFlags},
    grpc_server::GrpcServer,
    runtime::{Signals, block_on, trim_memory},
};

/// Compute node states and serve them over gRPC, without touching the kernel
///
/// Follows the cluster state and serves the state of this node to `agent`, to `print --target` and to backends written
/// for KPNG, until SIGTERM or SIGINT. Clients never receive a partial state.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    source: SourceFlags,
    #[command(flatten)]
    _config: config::ConfigFile,
    #[command(flatten)]
    serve: ServeFlags,
    #[command(flatten)]
    any_node: AnyNodeFlags,
    #[command(flatten)]
    reports: BrainReportFlags,
}

pub(super) fn main(flags: &Flags) -> Result<()> {
    block_on(brain(flags))
}

async fn brain(flags: &Flags) -> Result<()> {
    let mut signals = Signals::new()?;
    let serve = &flags.serve;
    let mut pipeline = Pipeline::start(flags.source.config()?)?;
    if flags.any_node.serve_any_node {
        pipeline = pipeline.without_node_check();
    }
    let served = pipeline.served(flags.any_node.serve_any_node);
    let admin = Admin::new(pipeline.node(), Role::Brain);
    let counted = CountedNodes::new(served.nodes);
    admin.watchers(counted.watchers());
    let served = ServedData { nodes: Arc::new(counted), ..served };
    let mut server = GrpcServer::start(&serve.listen, &serve.tls, served, &pipeline.subscribe()).await?;
    let _reports = flags.reports.serve(&admin);
    let observer = AdminObserver(&admin);
    let result = tokio::select! {
        () = admin.follow(pipeline.subscribe()) => Err(anyhow!("the brain has stopped publishing")),
        () = pipeline.run(&observer) => Err(anyhow!("the source has stopped; the log names the reason")),
        result = server.failed() => result,
        () = trim_memory() => Ok(()),
        () = signals.terminated() => Ok(()),
    };
    drop(pipeline);
    server.stop().await;
    tracing::info!("stopping; clients keep their last state");
    result
}
