//! `brain`: computes node states and serves them to other processes.

use std::{ffi::OsString, future::pending};

use admin::{Admin, Role, Servers};
use anyhow::{Result, anyhow};
use clap::{Args, builder::ArgPredicate};
use pipeline::{Config, Pipeline};

use super::{
    backend_process::{BackendProcess, PrivateSocket},
    config::{self, Configuration},
    events, explain,
    flags::{DEFAULT_SOCKET, ListenFlags, ReportFlags, SourceFlags},
    grpc_server::GrpcServer,
    runtime::{Signals, block_on, trim_memory},
};

/// Compute node states and serve them over gRPC, without touching the kernel
///
/// Follows the cluster state and serves the state of this node to `agent`, to `print --target` and to backends written
/// for KPNG, until SIGTERM or SIGINT. Clients never receive a partial state.
///
/// With a command after `--`, as in `brain --source file:manifests -- kube-proxy-userspace`, it runs that backend beside it,
/// which finds its brain in $KUBE_PROXY_EBPF_TARGET and its node in $NODE_NAME; both end together. The brain then listens at a
/// socket of the two, and elsewhere only as --listen says.
// The pages are off by default: beside an agent on the same node, the ports and the socket are the agent's.
#[derive(Debug, Args)]
#[command(
    mut_arg("listen", |it| {
        it.default_value(DEFAULT_SOCKET).default_value_if("backend", ArgPredicate::IsPresent, None)
    }),
    mut_arg("probe_bind_address", |it| it.default_value("0").env("KUBE_PROXY_EBPF_BRAIN_PROBE_BIND_ADDRESS")),
    mut_arg("healthz_bind_address", |it| it.default_value("0").env("KUBE_PROXY_EBPF_BRAIN_HEALTHZ_BIND_ADDRESS")),
    mut_arg("metrics_bind_address", |it| it.default_value("0").env("KUBE_PROXY_EBPF_BRAIN_METRICS_BIND_ADDRESS")),
    mut_arg("status_socket", |it| it.default_value("0").env("KUBE_PROXY_EBPF_BRAIN_STATUS_SOCKET")),
)]
pub(super) struct Flags {
    /// A backend to run beside the brain, and its arguments, after `--`
    #[arg(value_name = "COMMAND", last = true)]
    backend: Vec<OsString>,
    #[command(flatten)]
    source: SourceFlags,
    #[command(flatten)]
    _config: config::ConfigFile,
    #[command(flatten)]
    listen: ListenFlags,
    #[command(flatten)]
    reports: ReportFlags,
}

pub(super) fn main(flags: Flags, configuration: Configuration) -> Result<()> {
    block_on(brain(flags, configuration))
}

async fn brain(mut flags: Flags, configuration: Configuration) -> Result<()> {
    let mut signals = Signals::new()?;
    let private = (!flags.backend.is_empty()).then(PrivateSocket::new).transpose()?;
    flags.listen.listen.extend(private.as_ref().map(PrivateSocket::target));
    let config = flags.source.config(flags.listen.serve_any_node)?;
    let pipeline = Pipeline::start(Config { checks_node: !flags.listen.serve_any_node, ..config })?;
    let admin = Admin::new(pipeline.node.as_str(), Role::Brain);
    pipeline.register(&mut admin.registry());
    if pipeline.requires_node() {
        admin.require_node();
    }
    // It has no ports to report.
    drop(events::start(&admin, &pipeline, flags.listen.serve_any_node));
    let mut server = GrpcServer::start(&flags.listen, &pipeline, &admin).await?;
    let servers = Servers::start()?;
    explain::serve(&admin, pipeline.explainer());
    flags.reports.serve(&admin, &servers, configuration.pages.clone());
    let backend =
        private.as_ref().map(|it| BackendProcess::start(&flags.backend, &it.target(), &pipeline.node));
    let mut backend = backend.transpose()?;
    let result = tokio::select! {
        () = admin.run(pipeline.subscribe()) => Err(anyhow!("the brain has stopped publishing")),
        () = pipeline.run(&admin) => Err(anyhow!("the source has stopped; the log names the reason")),
        result = server.failed() => result,
        result = ended(backend.as_mut()) => result,
        () = trim_memory() => Ok(()),
        error = configuration.changed() => Err(error),
        () = signals.terminated() => Ok(()),
    };
    if let Some(backend) = backend {
        backend.stop().await;
    }
    drop(pipeline);
    server.stop().await;
    tracing::info!("stopping; clients keep their last state");
    result
}

/// Waits until the backend ends by itself; forever without one.
async fn ended(backend: Option<&mut BackendProcess>) -> Result<()> {
    match backend {
        Some(it) => it.ended().await,
        None => pending().await,
    }
}
