//! Where a process tells how it is.

use std::net::SocketAddr;

use admin::{Admin, Bind, Endpoint, Servers, Site};
use clap::Args;

/// Where a node tells how it is.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct Reports {
    /// Where to be asked for health: IP:PORT; 0 or nothing for nowhere
    ///
    /// /healthz is for load balancers, /livez and /readyz are for probes, with the bodies and rules of kube-proxy: 503 if
    /// a change has waited for a minute to be applied, if the programs are not in effect, or (/healthz) if the node is
    /// about to go. The unspecified address of either family stands for all addresses of both.
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "0.0.0.0:10256",
        env = "KUBE_PROXY_EBPF_HEALTHZ_BIND_ADDRESS",
        help_heading = "Reports"
    )]
    healthz_bind_address: Bind<10256>,
    /// Where to be asked for metrics: IP:PORT; 0 or nothing for nowhere
    ///
    /// /metrics is for Prometheus; /status says how the process stands, /state what it serves (both JSON).
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1:10249",
        env = "KUBE_PROXY_EBPF_METRICS_BIND_ADDRESS",
        help_heading = "Reports"
    )]
    metrics_bind_address: Bind<10249>,
}

impl Reports {
    /// Begins to tell. Must be called within a tokio runtime.
    pub(in crate::cli) fn serve(&self, admin: &Admin) -> Servers {
        serve_reports(admin, self.healthz_bind_address, self.metrics_bind_address)
    }

    /// Where to be asked for health.
    pub(in crate::cli) fn health(&self) -> Option<SocketAddr> {
        self.healthz_bind_address.0
    }

    /// Where to be asked for metrics.
    pub(in crate::cli) fn metrics(&self) -> Option<SocketAddr> {
        self.metrics_bind_address.0
    }
}

/// Where a brain tells how it is, if it is told to: beside an agent on the same node, kube-proxy's ports are the agent's.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct BrainReports {
    /// Where to be asked for health, if anywhere: IP:PORT
    ///
    /// /healthz, /livez and /readyz, as in `run`, but for the data plane.
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "0",
        env = "KUBE_PROXY_EBPF_BRAIN_HEALTHZ_BIND_ADDRESS",
        help_heading = "Reports"
    )]
    healthz_bind_address: Bind<10256>,
    /// Where to be asked for metrics, if anywhere: IP:PORT
    ///
    /// /metrics is for Prometheus; /status says how the process stands, /state what it decided (both JSON).
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "0",
        env = "KUBE_PROXY_EBPF_BRAIN_METRICS_BIND_ADDRESS",
        help_heading = "Reports"
    )]
    metrics_bind_address: Bind<10249>,
}

impl BrainReports {
    /// Begins to tell. Must be called within a tokio runtime.
    pub(in crate::cli) fn serve(&self, admin: &Admin) -> Servers {
        serve_reports(admin, self.healthz_bind_address, self.metrics_bind_address)
    }
}

fn serve_reports(admin: &Admin, healthz: Bind<10256>, metrics: Bind<10249>) -> Servers {
    let health =
        healthz.0.map(|address| Endpoint { site: Site::Health, address, flag: "healthz-bind-address" });
    let metrics =
        metrics.0.map(|address| Endpoint { site: Site::Metrics, address, flag: "metrics-bind-address" });
    Servers::start(admin, health.into_iter().chain(metrics))
}
