//! `agent`: programs the kernel with the state that a brain serves.

use std::time::SystemTime;

use admin::{Admin, HealthChecks, Role, Servers};
use anyhow::{Result, bail};
use clap::Args;
use pipeline::{Explainer, Observer as _, Stage, SyncStatus};
use publish::upstream::Upstream;

use super::{
    config::{self, Configuration},
    datapath, explain,
    flags::{DatapathFlags, InitFlag, NodeFlags, PacketFlags, PodFlags, ReportFlags, UiFlag, UpstreamFlags},
    runtime::{Signals, block_on},
};

/// Program this node's kernel with the state that a brain serves
///
/// Follows a `brain` (or KPNG) over gRPC and applies its state, until SIGTERM or SIGINT.
/// While the brain is unreachable, the last state stays active, the log reports its age, and the agent keeps
/// reconnecting. The kernel keeps serving after the agent exits; `cleanup` removes everything.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    upstream: UpstreamFlags,
    #[command(flatten)]
    node: NodeFlags,
    #[command(flatten)]
    pods: PodFlags,
    #[command(flatten)]
    _config: config::ConfigFile,
    #[command(flatten)]
    init: InitFlag,
    #[command(flatten)]
    datapath: DatapathFlags,
    #[command(flatten)]
    packets: PacketFlags,
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
    block_on(agent(flags, configuration))
}

async fn agent(flags: Flags, configuration: Configuration) -> Result<()> {
    let mut signals = Signals::new()?;
    let name = flags.node.name()?;
    let admin = Admin::new(name.as_str(), Role::Backend);
    let servers = Servers::start()?;
    let sockets = flags.datapath.options(&name, Some(&flags.pods))?;
    let node_port_addresses = sockets.node_port_addresses.clone();
    let health_checks = HealthChecks::new(&admin, name.as_str(), node_port_addresses, None, servers.handle());
    let options = flags.packets.options(sockets)?;
    let upstream = Upstream::new(flags.upstream.client(&name)?, name).confirmed_by(admin.active());
    let pin_dir = options.sockets.as_ref().map(|it| it.pin_dir.clone());
    explain::serve_with_kernel(&admin, Explainer::Brain(upstream.client.clone()), pin_dir);
    flags.reports.serve(&admin, &servers, configuration.pages.clone());
    flags.ui.serve(&admin, &servers);
    let datapath = datapath::run(options, health_checks, || upstream.subscribe(), &admin);
    tokio::select! {
        result = datapath => {
            result?;
            bail!("the subscription to the brain has ended")
        }
        () = admin.run(upstream.subscribe()) => bail!("the subscription to the brain has ended"),
        () = report_brain(&admin, &upstream) => bail!("the subscription to the brain has ended"),
        () = upstream.run() => bail!("following the brain has stopped; the log names the reason"),
        error = configuration.changed() => return Err(error),
        () = signals.terminated() => {}
    }
    datapath::report_stop();
    Ok(())
}

/// Reports whether the brain has sent a state, when it last did, why it cannot be followed, and whether it knows a Node object
/// of this node.
async fn report_brain(admin: &Admin, upstream: &Upstream) {
    let (mut states, mut outage) = (upstream.subscribe(), upstream.client.outage());
    let address = Some(upstream.client.targets().to_string());
    let mut status = SyncStatus { address, ..SyncStatus::default() };
    let mut reported = None;
    loop {
        admin.source("brain", status.clone());
        tokio::select! {
            published = states.next() => {
                let Some(published) = published else { return };
                status.is_synced = true;
                status.last_contact = Some(SystemTime::now());
                let unknown = pipeline::unknown_node(&published.node, &published.state.nodes, false);
                if let Some(it) = unknown.as_ref().filter(|it| reported.as_ref() != Some(*it)) {
                    tracing::warn!("{it}");
                }
                admin.rejected(Stage::Brain, &unknown.iter().cloned().collect());
                reported = unknown;
            }
            // The client outlives the loop.
            Ok(()) = outage.changed() => {
                status.error.clone_from(&outage.borrow_and_update());
                if status.is_synced && status.error.is_none() {
                    status.last_contact = Some(SystemTime::now());
                }
            }
        }
    }
}
