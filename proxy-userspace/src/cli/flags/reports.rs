//! Where a process serves health, metrics and status pages.

use std::net::SocketAddr;

use admin::{Admin, Bind, Endpoint, Servers, Site};
use clap::Args;

/// For messages about a process that was not found at the address of its metrics pages.
pub(in crate::cli) const METRICS_HINT: &str =
    "for details give the --config or --metrics-bind-address that it was started with";

/// Pages of a node.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct ReportFlags {
    /// Address of the health pages, IP:PORT; 0 or an empty value disables them
    ///
    /// /healthz is for load balancers, /livez and /readyz are for probes, with the bodies and rules of kube-proxy: status
    /// 503 if a change has been pending for a minute, if the programs are not attached, or (/healthz) if the node is about
    /// to be deleted. The unspecified address of either family listens on all addresses of both.
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "0.0.0.0:10256",
        env = "KUBE_PROXY_EBPF_HEALTHZ_BIND_ADDRESS",
        help_heading = "Reports"
    )]
    healthz_bind_address: Bind<10256>,
    /// Address of the metrics pages, IP:PORT; 0 or an empty value disables them
    ///
    /// /metrics is for Prometheus; /status (JSON) is the state of the process, /state (JSON) what it serves.
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1:10249",
        env = "KUBE_PROXY_EBPF_METRICS_BIND_ADDRESS",
        help_heading = "Reports"
    )]
    metrics_bind_address: Bind<10249>,
}

impl ReportFlags {
    /// Starts the servers. Must be called within a tokio runtime.
    pub(in crate::cli) fn serve(&self, admin: &Admin) -> Servers {
        serve(admin, self.health(), self.metrics())
    }

    /// Address of the health pages.
    pub(in crate::cli) fn health(&self) -> Option<SocketAddr> {
        self.healthz_bind_address.0
    }

    /// Address of the metrics pages.
    pub(in crate::cli) fn metrics(&self) -> Option<SocketAddr> {
        self.metrics_bind_address.0
    }
}

/// Pages of a brain, off by default: kube-proxy's ports belong to the agent on the same node.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct BrainReportFlags {
    /// Address of the health pages, IP:PORT; 0 disables them
    ///
    /// /healthz, /livez and /readyz, as in `run`, without the checks of the datapath.
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "0",
        env = "KUBE_PROXY_EBPF_BRAIN_HEALTHZ_BIND_ADDRESS",
        help_heading = "Reports"
    )]
    healthz_bind_address: Bind<10256>,
    /// Address of the metrics pages, IP:PORT; 0 disables them
    ///
    /// /metrics is for Prometheus; /status (JSON) is the state of the process, /state (JSON) the state of this node.
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "0",
        env = "KUBE_PROXY_EBPF_BRAIN_METRICS_BIND_ADDRESS",
        help_heading = "Reports"
    )]
    metrics_bind_address: Bind<10249>,
}

impl BrainReportFlags {
    /// Starts the servers. Must be called within a tokio runtime.
    pub(in crate::cli) fn serve(&self, admin: &Admin) -> Servers {
        serve(admin, self.healthz_bind_address.0, self.metrics_bind_address.0)
    }
}

fn serve(admin: &Admin, health: Option<SocketAddr>, metrics: Option<SocketAddr>) -> Servers {
    let health = health.map(|address| Endpoint { site: Site::Health, address, flag: "healthz-bind-address" });
    let metrics =
        metrics.map(|address| Endpoint { site: Site::Metrics, address, flag: "metrics-bind-address" });
    Servers::start(admin, health.into_iter().chain(metrics))
}
