//! The datapath of `run` and `agent`.

use std::{cell::OnceCell, future::pending, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use ::datapath::{PortCounts, described};
use admin::{Admin, CounterLookup, HealthChecks, Inherited};
use anyhow::Result;
use datapath_ebpf::ActiveFrontends;
use datapath_nft::ExternalConnections;
use model::{
    Protocol, ServiceName, error_chain,
    state::{Service, ServicePort},
};
use publish::Subscription;
use reconciler::{Datapath, Metrics, Options};
use tokio::{task::spawn_blocking, time::sleep};

use super::{flags, trace};

/// How long the first state may take before what serves meanwhile is reported.
const FIRST_STATE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a first state may take until it is active, before what serves meanwhile is reported.
const APPLY_TIMEOUT: Duration = Duration::from_secs(20);

/// Takes over the state in the kernel and applies what is published, until the publisher is gone.
///
/// May be dropped at any point: the next start continues from there. After an error, what was active before stays active.
pub(super) async fn run(
    mut options: Options,
    health_checks: HealthChecks,
    subscribe: impl Fn() -> Subscription,
    admin: &Admin,
) -> Result<()> {
    for reason in options.remarks() {
        tracing::warn!("{reason}");
    }
    if options.sockets.is_some() {
        admin.set_readers(|it| it.has_sockets = true);
    }
    let (pin_dir, has_packets) =
        (options.sockets.as_ref().map(|it| it.pin_dir.clone()), options.packets.is_some());
    admin.set_readers(|it| {
        it.counters =
            Some(Arc::new(move || Some(Box::new(KernelCounts::read(pin_dir.as_deref(), has_packets)?))));
    });
    let traces = trace::serve(admin, &options);
    let metrics = Metrics::new(&mut admin.registry());
    if let Some(packets) = &mut options.packets {
        packets.on_flow_pass = metrics.flow_pass_observer();
    }
    let inherited = report_inherited(admin.clone(), options.clone());
    let datapath = spawn_blocking(move || {
        if let Some(packets) = &options.packets {
            flags::apply(&packets.conntrack);
        }
        Datapath::start(&options)
    });
    let datapath = datapath.await??;
    // Health checks of load balancers are answered only once the datapath runs.
    tokio::select! {
        () = reconciler::run(datapath, subscribe(), traces, admin, metrics) => {}
        () = health_checks.run(subscribe()) => {}
        () = inherited => {}
    }
    Ok(())
}

/// Reports what remains when this process ends.
pub(super) fn report_stop() {
    tracing::info!(
        "stopping; the kernel keeps serving the last state, without updates (`cleanup` removes it)"
    );
}

/// Reports what an earlier process left in the kernel, if no state is active soon; never returns.
async fn report_inherited(admin: Admin, options: Options) {
    sleep(FIRST_STATE_TIMEOUT).await;
    // A large state takes long to be written, and as long to be read.
    if admin.has_published() {
        sleep(APPLY_TIMEOUT).await;
    }
    // Its result is reported, or there is none.
    let _ = spawn_blocking(move || admin.set_inherited(|| inherited(&options))).await;
    pending::<()>().await;
}

/// What is in the kernel; `None` if nothing serves.
fn inherited(options: &Options) -> Option<Inherited> {
    let Some(sockets) = &options.sockets else {
        let addresses = datapath_nft::frontend_addresses().ok().filter(|it| !it.is_empty())?;
        let serves = described(addresses.into_iter().map(|it| (it, None)));
        return Some(Inherited { serves, programs: Ok(()) });
    };
    let frontends = ActiveFrontends::open(&sockets.pin_dir);
    let frontends =
        frontends.and_then(|mut it| it.filter_map(|it| Some((it.address, Some(it.port))))).ok()?;
    let programs = match datapath_ebpf::query_at(sockets.cgroup.as_deref(), &sockets.pin_dir) {
        Ok(status) if status.is_complete() => Ok(()),
        Ok(status) => {
            let missing: Vec<_> = status.missing().map(|it| it.name).collect();
            Err(format!("not attached to {}: {}", status.cgroup.display(), missing.join(", ")))
        }
        Err(error) => Err(error.to_string()),
    };
    Some(Inherited { serves: described(frontends), programs })
}

/// The kernel's counters, for the pages.
struct KernelCounts {
    sockets: Option<datapath_ebpf::Counts>,
    has_packets: bool,
    /// Read once a page asks for them.
    external: OnceCell<ExternalConnections>,
}

impl KernelCounts {
    /// Reads those of sockets, whose maps are pinned in a directory; `None` if that fails.
    fn read(pin_dir: Option<&Path>, has_packets: bool) -> Option<Self> {
        let sockets = pin_dir.map(datapath_ebpf::counts).transpose().ok()?;
        Some(Self { sockets, has_packets, external: OnceCell::new() })
    }
}

impl CounterLookup for KernelCounts {
    fn port(&self, service: &ServiceName, port: &str, protocol: Protocol) -> Option<PortCounts> {
        self.sockets.as_ref()?.port(service, port, protocol)
    }

    fn endpoint(&self, service: &ServiceName, port: &str, protocol: Protocol, endpoint: SocketAddr) -> u64 {
        self.sockets.as_ref().map_or(0, |it| it.endpoint(service, port, protocol, endpoint))
    }

    fn external_connections(&self, service: &Service, port: &ServicePort) -> u64 {
        if !self.has_packets {
            return 0;
        }
        let external = self.external.get_or_init(|| {
            ExternalConnections::read().unwrap_or_else(|error| {
                tracing::debug!(error = error_chain(&error), "connections from outside cannot be counted");
                ExternalConnections::default()
            })
        });
        external.of(service, port)
    }
}
