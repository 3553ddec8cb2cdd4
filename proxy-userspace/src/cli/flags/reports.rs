//! Where a process serves health, metrics and status pages.

use std::net::SocketAddr;

use admin::{Admin, BindAddress, PageGroup, Servers};
use clap::Args;

/// For messages about a process that was not found at the address of its metrics pages.
pub(in crate::cli) const METRICS_HINT: &str =
    "for details give the --config or --metrics-bind-address that it was started with";

/// Addresses of the pages.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct ReportFlags {
    /// Address of the health pages, IP:PORT; 0 or an empty value disables them
    ///
    /// /healthz is for load balancers, /livez and /readyz are for probes, with the bodies and rules of kube-proxy: status
    /// 503 if a change has been pending for a minute, if the programs are not attached, or (/healthz) if the node is about
    /// to be deleted. A brain has no datapath to check. The unspecified address of either family listens on all addresses of both.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:10256", help_heading = "Reports")]
    healthz_bind_address: BindAddress<10256>,
    /// Address of the metrics pages, IP:PORT; 0 or an empty value disables them
    ///
    /// /metrics is for Prometheus; /status (JSON) is the state of the process, /state (JSON) what it serves.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:10249", help_heading = "Reports")]
    metrics_bind_address: BindAddress<10249>,
}

impl ReportFlags {
    /// Starts the servers. Must be called within a tokio runtime.
    pub(in crate::cli) fn serve(&self, admin: &Admin) -> Servers {
        let health = self.health().map(|it| (PageGroup::Health, it));
        let metrics = self.metrics().map(|it| (PageGroup::Metrics, it));
        admin::serve_pages(admin, health.into_iter().chain(metrics))
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
