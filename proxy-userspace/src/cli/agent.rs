//! `agent`: does what a brain decides.

use anyhow::{Result, bail};
use backend::ebpf::Node;
use clap::Args;
use proto::client::Client;
use publish::upstream::Upstream;

use super::{flags, signals::Signals};

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
    data_plane: flags::DataPlane,
}

pub(super) fn main(flags: Flags) -> Result<()> {
    // One thread is enough: what takes long waits in the kernel, in a thread of its own.
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(agent(flags))
}

async fn agent(flags: Flags) -> Result<()> {
    let mut signals = Signals::new()?;
    let name = flags.node.name()?;
    let options = flags.data_plane.options(&name);
    let upstream = Upstream::new(Client::new(flags.upstream.target, name.as_str()), name);
    let node = tokio::task::spawn_blocking(move || Node::start(&options)).await??;
    tokio::select! {
        () = backend::follow(node, upstream.subscribe()) => bail!("nothing comes from the brain any more"),
        () = upstream.follow() => bail!("the brain is not followed any more; the log says why"),
        () = signals.terminated() => {}
    }
    tracing::info!("stopping; the kernel goes on serving the last state (`cleanup` would end that)");
    Ok(())
}
