//! `brain`: computes node states and serves them to other processes.

use std::sync::Arc;

use admin::{Admin, Role};
use anyhow::{Result, anyhow};
use clap::Args;
use pipeline::Pipeline;
use publish::{CountedNodes, grpc::ServedData};

use super::{
    admin_observer::AdminObserver,
    config,
    flags::{AnyNodeFlags, DEFAULT_SOCKET, ListenFlags, ReportFlags, SourceFlags},
    grpc_server::GrpcServer,
    runtime::{Signals, block_on, trim_memory},
};

/// Compute node states and serve them over gRPC, without touching the kernel
///
/// Follows the cluster state and serves the state of this node to `agent`, to `print --target` and to backends written
/// for KPNG, until SIGTERM or SIGINT. Clients never receive a partial state.
// The pages are off by default: beside an agent on the same node, kube-proxy's ports are the agent's.
#[derive(Debug, Args)]
#[command(
    mut_arg("listen", |it| it.default_value(DEFAULT_SOCKET)),
    mut_arg("healthz_bind_address", |it| it.default_value("0").env("KUBE_PROXY_EBPF_BRAIN_HEALTHZ_BIND_ADDRESS")),
    mut_arg("metrics_bind_address", |it| it.default_value("0").env("KUBE_PROXY_EBPF_BRAIN_METRICS_BIND_ADDRESS")),
)]
pub(super) struct Flags {
    #[command(flatten)]
    source: SourceFlags,
    #[command(flatten)]
    _config: config::ConfigFile,
    #[command(flatten)]
    listen: ListenFlags,
    #[command(flatten)]
    any_node: AnyNodeFlags,
    #[command(flatten)]
    reports: ReportFlags,
}

pub(super) fn main(flags: &Flags) -> Result<()> {
    block_on(brain(flags))
}

async fn brain(flags: &Flags) -> Result<()> {
    let mut signals = Signals::new()?;
    let listen = &flags.listen;
    let mut pipeline = Pipeline::start(flags.source.config()?)?;
    if flags.any_node.serve_any_node {
        pipeline = pipeline.without_node_check();
    }
    let served = pipeline.served(flags.any_node.serve_any_node);
    let admin = Admin::new(pipeline.node(), Role::Brain);
    let counted = CountedNodes::new(served.nodes);
    admin.set_watcher_count(counted.watchers());
    let served = ServedData { nodes: Arc::new(counted), ..served };
    let mut server = GrpcServer::start(&listen.listen, &listen.tls, served, &pipeline.subscribe()).await?;
    let _reports = flags.reports.serve(&admin);
    let observer = AdminObserver(&admin);
    let result = tokio::select! {
        () = admin.run(pipeline.subscribe()) => Err(anyhow!("the brain has stopped publishing")),
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
