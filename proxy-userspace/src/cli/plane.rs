//! The data plane of `run` and `agent`: started, and kept at what is published.

use admin::{Admin, HealthChecks};
use anyhow::Result;
use backend::{Node, Options};
use publish::Subscription;
use tokio::task::spawn_blocking;

/// Takes over what is in the kernel, and keeps it at what is published, until the publisher is gone. Broken off at any
/// moment, it is taken up again by the next start.
///
/// # Errors
///
/// If the kernel cannot do it, or does not let us. Whatever served before goes on serving.
pub(super) async fn keep(
    options: Options,
    health_checks: HealthChecks,
    subscribe: impl Fn() -> Subscription,
    admin: &Admin,
) -> Result<()> {
    if let Some(sockets) = &options.sockets {
        admin.counters(sockets.pin_dir.clone());
    }
    let node = spawn_blocking(move || Node::start(&options)).await??;
    // Load balancers are answered once there is somebody to serve what they send.
    tokio::select! {
        () = backend::follow(node, subscribe(), admin) => {}
        () = health_checks.follow(subscribe()) => {}
    }
    Ok(())
}
