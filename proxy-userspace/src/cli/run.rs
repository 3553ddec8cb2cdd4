//! `run`: brain and datapath in one process.

use admin::{Admin, HealthChecks, Role, Servers};
use anyhow::{Result, anyhow};
use clap::Args;
use pipeline::Pipeline;

use super::{
    config::{self, Configuration},
    datapath, events, explain,
    flags::{DatapathFlags, InitFlag, ListenFlags, PacketFlags, ReportFlags, SourceFlags, UiFlag},
    grpc_server::GrpcServer,
    runtime::{Signals, block_on, trim_memory},
};

/// Run the proxy on this node: brain and datapath in one process
///
/// Follows the cluster state, computes what this node serves and programs the kernel, until SIGTERM or SIGINT.
/// The kernel keeps serving after that, and the next start takes over without interruption; `cleanup` removes everything.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    source: SourceFlags,
    #[command(flatten)]
    _config: config::ConfigFile,
    #[command(flatten)]
    init: InitFlag,
    #[command(flatten)]
    datapath: DatapathFlags,
    #[command(flatten)]
    packets: PacketFlags,
    #[command(flatten)]
    listen: ListenFlags,
    #[command(flatten)]
    reports: ReportFlags,
    #[command(flatten)]
    ui: UiFlag,
}

pub(super) fn main(flags: Flags, configuration: Configuration) -> Result<()> {
    if flags.init.init_only {
        flags.packets.initialize();
        return Ok(());
    }
    block_on(run(flags, configuration))
}

async fn run(flags: Flags, configuration: Configuration) -> Result<()> {
    let mut signals = Signals::new()?;
    // Errors in the source or the addresses are found before the kernel is touched.
    let pipeline = Pipeline::start(flags.source.config(flags.listen.serve_any_node)?)?;
    let admin = Admin::new(pipeline.node.as_str(), Role::Backend);
    pipeline.register(&mut admin.registry());
    if pipeline.requires_node() {
        admin.require_node();
    }
    let servers = Servers::start()?;
    let sockets = flags.datapath.options(&pipeline.node, Some(&flags.source.options.pods))?;
    let node_port_addresses = sockets.node_port_addresses.clone();
    let events = events::start(&admin, &pipeline, flags.listen.serve_any_node);
    let health_checks =
        HealthChecks::new(&admin, pipeline.node.as_str(), node_port_addresses, events, servers.handle());
    let options = flags.packets.options(sockets)?;
    let mut server = GrpcServer::start(&flags.listen, &pipeline, &admin).await?;
    let pin_dir = options.sockets.as_ref().map(|it| it.pin_dir.clone());
    explain::serve_with_kernel(&admin, pipeline.explainer(), pin_dir);
    flags.reports.serve(&admin, &servers, configuration.pages.clone());
    flags.ui.serve(&admin, &servers);
    let datapath = datapath::run(options, health_checks, || pipeline.subscribe(), &admin);
    let result = tokio::select! {
        result = datapath => result.and_then(|()| Err(anyhow!("the brain has stopped publishing"))),
        () = admin.run(pipeline.subscribe()) => Err(anyhow!("the brain has stopped publishing")),
        () = pipeline.run(&admin) => Err(anyhow!("the source has stopped; the log names the reason")),
        result = server.failed() => result,
        () = trim_memory() => Ok(()),
        error = configuration.changed() => Err(error),
        () = signals.terminated() => Ok(()),
    };
    drop(pipeline);
    server.stop().await;
    if result.is_ok() {
        datapath::report_stop();
    }
    result
}
