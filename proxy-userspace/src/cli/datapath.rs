//! The datapath of `run` and `agent`.

use admin::{Admin, HealthChecks};
use anyhow::Result;
use publish::Subscription;
use reconciler::{Datapath, Options, Reconciler};
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
        let pin_dir = sockets.pin_dir.clone();
        admin.set_counter_source(move || {
            let counts = datapath_ebpf::counts(&pin_dir).ok()?;
            Some(Box::new(move |service, port, protocol| counts.port(service, port, protocol)))
        });
    }
    let datapath = spawn_blocking(move || Datapath::start(&options)).await??;
    // Health checks of load balancers are answered only once the datapath runs.
    tokio::select! {
        () = Reconciler::new(datapath, subscribe(), admin).run() => {}
        () = health_checks.run(subscribe()) => {}
    }
    Ok(())
}
