//! What the reconciler counts.

use std::{io, sync::Arc};

use datapath::TerminationReport;
use datapath_nft::FlowPassObserver;
use metrics::{Histograms, Label, add, by_family, ip_family, sync_durations, with_series};
use netlink::sock_diag::Transport;
use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

use crate::observer::Step;

/// Counts failures, detachments, terminated sockets, and passes over conntrack.
pub struct Metrics {
    failures: Family<Label, Counter>,
    sync_failures: Family<Label, Counter>,
    cleanup_failures: Family<Label, Counter>,
    pub(crate) program_detachments: Counter,
    udp_sockets_terminated: Counter,
    tcp_connections_drained: Counter,
    flow_pass_duration: Histograms<Label>,
    flows_deleted: Family<Label, Counter>,
}

impl Metrics {
    pub fn new(registry: &mut Registry) -> Self {
        let steps = with_series(Family::default(), Step::ALL.map(|it| [("step", it.name())]));
        let families = || with_series(Family::default(), by_family());
        let it = registry;
        Self {
            failures: add(it, "kube_proxy_ebpf_failures", steps),
            sync_failures: add(it, "kubeproxy_sync_proxy_rules_nftables_sync_failures", families()),
            cleanup_failures: add(it, "kubeproxy_sync_proxy_rules_nftables_cleanup_failures", families()),
            program_detachments: add(it, "kube_proxy_ebpf_program_detachments", Counter::default()),
            udp_sockets_terminated: add(it, "kube_proxy_ebpf_udp_sockets_terminated", Counter::default()),
            tcp_connections_drained: add(it, "kube_proxy_ebpf_tcp_connections_drained", Counter::default()),
            flow_pass_duration: add(
                it,
                "kubeproxy_conntrack_reconciler_sync_duration_seconds",
                sync_durations(),
            ),
            flows_deleted: add(it, "kubeproxy_conntrack_reconciler_deleted_entries", families()),
        }
    }

    /// What counts the passes over conntrack.
    pub fn flow_pass_observer(&self) -> FlowPassObserver {
        let (durations, deletions) = (self.flow_pass_duration.clone(), self.flows_deleted.clone());
        FlowPassObserver(Arc::new(move |family, took, deleted| {
            durations.get_or_create(&ip_family(family)).observe(took.as_secs_f64());
            deletions.get_or_create(&ip_family(family)).inc_by(deleted as u64);
        }))
    }

    pub(crate) fn on_failed(&self, step: Step) {
        self.failures.get_or_create(&[("step", step.name())]).inc();
        let failures = match step {
            Step::Apply => &self.sync_failures,
            Step::Finish => &self.cleanup_failures,
            Step::Attach => return,
        };
        for it in by_family() {
            failures.get_or_create(&it).inc();
        }
    }

    pub(crate) fn on_terminated(&self, transport: Transport, report: &io::Result<TerminationReport>) {
        let counter = match transport {
            Transport::Tcp => &self.tcp_connections_drained,
            Transport::Udp => &self.udp_sockets_terminated,
        };
        counter.inc_by(report.as_ref().map_or(0, |it| it.sockets) as u64);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use model::Family as IpFamily;
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn failures_sockets_and_conntrack_passes_are_counted() {
        let mut registry = Registry::default();
        let metrics = Metrics::new(&mut registry);
        metrics.on_failed(Step::Apply);
        metrics.on_failed(Step::Finish);
        metrics.on_terminated(Transport::Tcp, &Ok(TerminationReport { sockets: 2, all_namespaces: true }));
        metrics.on_terminated(Transport::Udp, &Err(io::ErrorKind::PermissionDenied.into()));
        (metrics.flow_pass_observer().0)(IpFamily::V6, Duration::from_millis(3), 4);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            r#"kube_proxy_ebpf_failures_total{step="apply"} 1"#,
            r#"kube_proxy_ebpf_failures_total{step="attach"} 0"#,
            r#"kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family="IPv4"} 1"#,
            r#"kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family="IPv6"} 1"#,
            r#"kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total{ip_family="IPv4"} 1"#,
            r#"kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total{ip_family="IPv6"} 1"#,
            "kube_proxy_ebpf_tcp_connections_drained_total 2",
            "kube_proxy_ebpf_udp_sockets_terminated_total 0",
            r#"kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family="IPv4"} 0"#,
            r#"kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family="IPv6"} 4"#,
            r#"kubeproxy_conntrack_reconciler_sync_duration_seconds_count{ip_family="IPv6"} 1"#,
        ] {
            assert!(text.lines().any(|it| it == line), "{line} is not in {text}");
        }
    }
}
