//! `agent`: does what a brain decides.

use std::time::SystemTime;

use admin::{Admin, Role, Source, Stage};
use anyhow::{Result, bail};
use clap::Args;
use publish::{Subscription, upstream::Upstream};

use super::{block_on, config, flags, own_node, packets, plane, signals::Signals};

/// Serve this node as a brain in another process decides
///
/// Follows a `brain` (or KPNG's) over gRPC and keeps the kernel at what it says, until SIGTERM or SIGINT.
/// While the brain is away the kernel goes on serving the last state, the log says how old it is, and the brain is
/// asked again until it is back. The kernel goes on serving after the agent has ended, too; `cleanup` takes it all away.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    upstream: flags::Upstream,
    #[command(flatten)]
    node: flags::Node,
    #[command(flatten)]
    _config: config::ConfigFile,
    #[command(flatten)]
    data_plane: flags::DataPlane,
    #[command(flatten)]
    packets: packets::PacketFlags,
    #[command(flatten)]
    reports: flags::Reports,
}

pub(super) fn main(flags: Flags) -> Result<()> {
    block_on(agent(flags))
}

async fn agent(flags: Flags) -> Result<()> {
    let mut signals = Signals::new()?;
    let name = flags.node.name()?;
    let admin = Admin::new(name.as_str(), Role::Serves);
    let health_checks = flags.data_plane.health_checks(&admin, &name)?;
    let options = flags.packets.options(flags.data_plane.options(&name)?)?;
    let upstream = Upstream::new(flags.upstream.client(&name)?, name);
    let _reports = flags.reports.serve(&admin);
    let kept = plane::keep(options, health_checks, || upstream.subscribe(), &admin);
    tokio::select! {
        kept = kept => {
            kept?;
            bail!("nothing comes from the brain any more")
        }
        () = admin.follow(upstream.subscribe()) => bail!("nothing comes from the brain any more"),
        () = tell_of_brain(&admin, upstream.subscribe()) => bail!("nothing comes from the brain any more"),
        () = upstream.run() => bail!("the brain is not followed any more; the log says why"),
        () = signals.terminated() => {}
    }
    tracing::info!("stopping; the kernel goes on serving the last state (`cleanup` would end that)");
    Ok(())
}

/// Tells whether the brain has said anything, when it last did, and whether it knows the node.
async fn tell_of_brain(admin: &Admin, mut states: Subscription) {
    const BRAIN: &str = "brain";
    admin.source(BRAIN, Source::default());
    let mut said = None;
    while let Some(published) = states.next().await {
        admin.source(BRAIN, Source { synced: true, last_contact: Some(SystemTime::now()), error: None });
        let stranger = own_node::stranger(&published.node, &published.state.nodes, false);
        if let Some(it) = stranger.as_ref().filter(|it| said.as_ref() != Some(*it)) {
            tracing::warn!("{it}");
        }
        admin.rejected(Stage::Brain, stranger.clone());
        said = stranger;
    }
}
