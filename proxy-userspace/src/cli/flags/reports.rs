//! Where a process serves health, metrics and status pages.

use std::{path::Path, sync::Arc};

use admin::{Admin, BindAddress, Configuration, Listener, PageGroup, Servers, Status, UiAddress};
use clap::Args;

use crate::cli::logging;

/// For messages about a process that was not found at the socket of its status pages.
pub(in crate::cli) const STATUS_HINT: &str = "for details give the --status-socket that it was started with";

/// Addresses of the pages.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct ReportFlags {
    /// Address of the health pages for the probes of the kubelet, IP:PORT; 0 or an empty value disables it
    ///
    /// The pages are those of --healthz-bind-address, on a thread of their own: connections to other addresses cannot delay
    /// them. Keep it on loopback; the kubelet's probes need `host: 127.0.0.1` then.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:10245", help_heading = "Reports")]
    probe_bind_address: BindAddress<10245>,
    /// Address of the health pages, IP:PORT; 0 or an empty value disables them
    ///
    /// /healthz is for load balancers, /livez and /readyz are for probes, with the bodies and rules of kube-proxy: status
    /// 503 if a change has been pending for a minute, if the programs are not attached, or (/healthz) if the node is about
    /// to be deleted. A brain has no datapath to check. The unspecified address of either family listens on all addresses
    /// of both. Beyond 512 connections, 64 of one source, the oldest one is closed for a new one.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:10256", help_heading = "Reports")]
    pub(in crate::cli) healthz_bind_address: BindAddress<10256>,
    /// Address of the metrics pages, IP:PORT; 0 or an empty value disables them
    ///
    /// /metrics is for Prometheus, and /metrics/slis has the results of health checks; /configz, /flagz and /statusz are those of
    /// Kubernetes' components. Whoever reaches it sees the names of Services that are used.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:10249", help_heading = "Reports")]
    pub(in crate::cli) metrics_bind_address: BindAddress<10249>,
    #[command(flatten)]
    pub(in crate::cli) status: StatusSocketFlag,
}

/// Where a process serves its page for people.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct UiFlag {
    /// Serve a page for people at this loopback address, IP:PORT as in 127.0.0.1:10247, or Unix socket, unix:///path
    ///
    /// The page shows Services with their connections per second, the endpoints of one with their shares and why each is used
    /// or not, and what each generation changed. It asks for no password: every client that can connect sees it, so that addresses
    /// which other hosts reach are refused. A Unix socket has mode 0600. While no browser shows it, it costs nothing.
    #[arg(long, value_name = "ADDRESS", help_heading = "Reports")]
    ui: Option<UiAddress>,
}

impl UiFlag {
    /// Serves the page if that is wanted, until `servers` is dropped.
    pub(in crate::cli) fn serve(&self, admin: &Admin, servers: &Servers) {
        if let Some(address) = &self.ui {
            servers.serve_ui(admin, address);
        }
    }
}

/// Where a process serves its status pages, and where commands find it.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct StatusSocketFlag {
    /// Unix socket of the status pages, which `status`, `check`, `top`, `explain`, `trace` and `support-bundle` read; 0 or an empty value disables them
    ///
    /// /status (JSON) is the state of the process, /state (JSON) what it serves, /explain (JSON)
    /// answers `explain`, /trace `trace`; /metrics, /config and /log are for `support-bundle`. The socket has mode 0600. A second instance on a node needs a socket of its own.
    #[arg(
        long,
        value_name = "PATH",
        default_value = "/run/kube-proxy-ebpf/status.sock",
        help_heading = "Reports"
    )]
    status_socket: String,
}

impl ReportFlags {
    /// Serves the pages, until `servers` is dropped. `configuration` is what the process was started with.
    pub(in crate::cli) fn serve(&self, admin: &Admin, servers: &Servers, configuration: Configuration) {
        admin.set_readers(|it| {
            it.configuration = configuration;
            it.log = Some(Arc::new(logging::newest_lines));
        });
        let pages = [
            (PageGroup::Probes, self.probe_bind_address.0),
            (PageGroup::Health, self.healthz_bind_address.0),
            (PageGroup::Metrics, self.metrics_bind_address.0),
        ];
        for (pages, address) in pages {
            if let Some(address) = address {
                servers.serve(admin, pages, address);
            }
        }
        if let Some(path) = self.status.path() {
            servers.serve_at_socket(admin, PageGroup::Status, path);
        }
    }
}

impl StatusSocketFlag {
    /// The socket, unless it is disabled.
    pub(in crate::cli) fn path(&self) -> Option<&Path> {
        Some(&*self.status_socket).filter(|it| !matches!(*it, "" | "0")).map(Path::new)
    }

    /// The status of the process that serves its pages there, if it answers.
    pub(in crate::cli) fn status(&self) -> Option<Box<Status>> {
        match admin::query_status(self.path()?) {
            Ok(Listener::Proxy(status)) => Some(status),
            _ => None,
        }
    }
}
