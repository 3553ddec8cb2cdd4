//! The datapath of `run` and `agent`.

use admin::{Admin, HealthChecks};
use anyhow::Result;
use backend::{Node, Options};
use publish::Subscription;
use tokio::task::spawn_blocking;

/// Takes over the state in the kernel and applies what is published, until the publisher is gone.
///
/// May be dropped at any point: the next start continues from there.
///
/// # Errors
///
/// If the kernel lacks a feature or denies access. What was active before stays active.
pub(super) async fn run(
    options: Options,
    health_checks: HealthChecks,
    subscribe: impl Fn() -> Subscription,
    admin: &Admin,
) -> Result<()> {
    if let Some(sockets) = &options.sockets {
        admin.counters(sockets.pin_dir.clone());
    }
    let node = spawn_blocking(move || Node::start(&options)).await??;
    // Health checks of load balancers are answered only once the datapath runs.
    tokio::select! {
        () = backend::follow(node, subscribe(), admin) => {}
        () = health_checks.follow(subscribe()) => {}
    }
    Ok(())
}
