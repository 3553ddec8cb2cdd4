//! The page `/metrics`: kube-proxy's names, so that existing dashboards and alerts continue to work, and our own.
//!
//! Invariant: `docs/metrics.md` lists exactly the metrics that are served; a test compares the two.
//! Events are counted here as they happen; gauges are read from the state at each scrape.

mod by_family;
mod gauges;
mod process;
mod service_ports;
mod slis;
mod text;

use std::{
    fmt, iter,
    sync::{Arc, Mutex},
    time::Duration,
};

use datapath::ApplyReport;
use model::Family as IpFamily;
use pipeline::ApiRequest;
use prometheus_client::{
    encoding,
    metrics::{
        counter::Counter,
        family::Family,
        histogram::{Histogram, exponential_buckets, linear_buckets},
    },
    registry::Registry,
};
use reconciler::Step;

use self::{
    by_family::{ByFamily, FAMILIES, Histograms, IP_FAMILY, Label, counter_by_family},
    slis::Slis,
};
use crate::{
    counters::NewestReading,
    http_connections::HttpConnections,
    state::{AdminState, Role, lock},
    streaming::Parts,
    totals::ChangeCounts,
};

/// The prefix of our own names.
const OWN: &str = "kube_proxy_ebpf";
/// The prefix of kube-proxy's names.
const KUBE_PROXY: &str = "kubeproxy";

#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    state: Arc<Mutex<AdminState>>,
    pub(crate) counters: NewestReading,
    pub(crate) slis: Slis,
    sync_duration: ByFamily,
    full_sync_duration: ByFamily,
    partial_sync_duration: ByFamily,
    programming_duration: ByFamily,
    sync_failures: Family<Label, Counter>,
    cleanup_failures: Family<Label, Counter>,
    flow_pass_duration: ByFamily,
    flows_deleted: Family<Label, Counter>,
    requests: Family<[(&'static str, String); 3], Counter>,
    request_duration: Histograms<[(&'static str, String); 2]>,
    endpoint_changes: Counter,
    service_changes: Counter,
    healthz: Family<Label, Counter>,
    livez: Family<Label, Counter>,
    apply_duration: Histogram,
    failures: Family<Label, Counter>,
    pub(crate) apply_retries: Counter,
    pub(crate) program_detachments: Counter,
    pub(crate) udp_sockets_terminated: Counter,
    pub(crate) tcp_connections_drained: Counter,
}

impl Metrics {
    pub(crate) fn new(state: Arc<Mutex<AdminState>>, connections: HttpConnections) -> Self {
        // 1 ms to 16 s, as in kube-proxy.
        let sync = || ByFamily::new(|| Histogram::new(exponential_buckets(0.001, 2.0, 15)));
        let mut it = Self {
            registry: Registry::default(),
            state: Arc::clone(&state),
            counters: NewestReading::default(),
            slis: Slis::new(),
            sync_duration: sync(),
            full_sync_duration: sync(),
            partial_sync_duration: sync(),
            programming_duration: ByFamily::new(|| Histogram::new(programming_buckets())),
            sync_failures: counter_by_family(),
            cleanup_failures: counter_by_family(),
            flow_pass_duration: sync(),
            flows_deleted: counter_by_family(),
            requests: Family::default(),
            request_duration: Family::new_with_constructor(|| Histogram::new(REQUEST_BUCKETS)),
            endpoint_changes: Counter::default(),
            service_changes: Counter::default(),
            healthz: Family::default(),
            livez: Family::default(),
            // 50 µs to 6.5 s.
            apply_duration: Histogram::new(exponential_buckets(0.000_05, 2.0, 18)),
            failures: Family::default(),
            apply_retries: Counter::default(),
            program_detachments: Counter::default(),
            udp_sockets_terminated: Counter::default(),
            tcp_connections_drained: Counter::default(),
        };
        for code in ["200", "503"] {
            drop(it.healthz.get_or_create(&[("code", code)]));
            drop(it.livez.get_or_create(&[("code", code)]));
        }
        for step in Step::ALL {
            drop(it.failures.get_or_create(&[("step", step.name())]));
        }
        let role = lock(&state).role;
        it.register(role);
        it.registry.register_collector(Box::new(gauges::Gauges { state, connections }));
        it.registry.register_collector(Box::new(process::Process));
        it
    }

    fn register(&mut self, role: Role) {
        let kube_proxy = self.registry.sub_registry_with_prefix(KUBE_PROXY);
        kube_proxy.register("proxy_healthz", "Cumulative proxy healthz HTTP status", self.healthz.clone());
        kube_proxy.register("proxy_livez", "Cumulative proxy livez HTTP status", self.livez.clone());
        let requests = self.registry.sub_registry_with_prefix("rest_client");
        requests.register(
            "requests",
            "Number of HTTP requests, partitioned by status code, method, and host",
            self.requests.clone(),
        );
        requests.register(
            "request_duration_seconds",
            "Request latency in seconds. Broken down by verb, and host",
            self.request_duration.clone(),
        );
        let kube_proxy = self.registry.sub_registry_with_prefix(KUBE_PROXY);
        if role == Role::Brain {
            return;
        }
        kube_proxy.register(
            "sync_proxy_rules_duration_seconds",
            "SyncProxyRules latency in seconds",
            self.sync_duration.0.clone(),
        );
        kube_proxy.register(
            "sync_full_proxy_rules_duration_seconds",
            "SyncProxyRules latency in seconds for full resyncs",
            self.full_sync_duration.0.clone(),
        );
        kube_proxy.register(
            "sync_partial_proxy_rules_duration_seconds",
            "SyncProxyRules latency in seconds for partial resyncs",
            self.partial_sync_duration.0.clone(),
        );
        kube_proxy.register(
            "network_programming_duration_seconds",
            "In Cluster Network Programming Latency in seconds",
            self.programming_duration.0.clone(),
        );
        kube_proxy.register(
            "sync_proxy_rules_nftables_sync_failures",
            "Cumulative proxy nftables sync failures",
            self.sync_failures.clone(),
        );
        kube_proxy.register(
            "sync_proxy_rules_nftables_cleanup_failures",
            "Cumulative proxy nftables cleanup failures",
            self.cleanup_failures.clone(),
        );
        kube_proxy.register(
            "conntrack_reconciler_sync_duration_seconds",
            "ReconcileConntrackFlowsLatency latency in seconds",
            self.flow_pass_duration.0.clone(),
        );
        kube_proxy.register(
            "conntrack_reconciler_deleted_entries",
            "Cumulative conntrack flows deleted by conntrack reconciler",
            self.flows_deleted.clone(),
        );
        kube_proxy.register(
            "sync_proxy_rules_endpoint_changes",
            "Cumulative proxy rules Endpoint changes",
            self.endpoint_changes.clone(),
        );
        kube_proxy.register(
            "sync_proxy_rules_service_changes",
            "Cumulative proxy rules Service changes",
            self.service_changes.clone(),
        );
        let own = self.registry.sub_registry_with_prefix(OWN);
        own.register("apply_duration_seconds", "Time to apply a state", self.apply_duration.clone());
        own.register("failures", "Failed steps, which were retried", self.failures.clone());
        own.register("apply_retries", "Retries of a state after a failure", self.apply_retries.clone());
        own.register(
            "program_detachments",
            "Attach checks that found programs of ours detached by another process",
            self.program_detachments.clone(),
        );
        own.register(
            "udp_sockets_terminated",
            "Connected UDP sockets that were destroyed because their endpoint no longer serves",
            self.udp_sockets_terminated.clone(),
        );
        own.register(
            "tcp_connections_drained",
            "TCP connections that were ended because their endpoint left a Service that drains",
            self.tcp_connections_drained.clone(),
        );
    }

    /// The parts of the page: all metrics in Prometheus' text format.
    pub(crate) fn parts(&self) -> Result<Parts, fmt::Error> {
        let (role, served) = {
            let state = lock(&self.state);
            (state.role, state.served())
        };
        let mut openmetrics = String::new();
        encoding::text::encode(&mut openmetrics, &self.registry)?;
        let parts = iter::once(text::from_openmetrics(&openmetrics));
        if role == Role::Brain {
            return Ok(Box::new(parts.map(Ok)));
        }
        let services = served.map(|it| it.state.services.clone()).unwrap_or_default();
        let ports = service_ports::parts(OWN, services, self.counters.read(&self.state));
        Ok(Box::new(parts.chain(ports).map(Ok)))
    }

    /// The page as a whole.
    #[cfg(test)]
    pub(crate) fn text(&self) -> Result<String, String> {
        self.parts().map_err(|it| it.to_string())?.collect()
    }

    pub(crate) fn on_published(&self, changes: ChangeCounts) {
        self.endpoint_changes.inc_by(changes.endpoints as u64);
        self.service_changes.inc_by(changes.services as u64);
    }

    /// `delays`: the time from each change in the cluster until it was active.
    pub(crate) fn on_applied(&self, report: &ApplyReport, took: Duration, delays: &[(IpFamily, Duration)]) {
        let seconds = took.as_secs_f64();
        self.sync_duration.observe_both(seconds);
        self.apply_duration.observe(seconds);
        let by_kind = if report.is_full { &self.full_sync_duration } else { &self.partial_sync_duration };
        by_kind.observe_both(seconds);
        for (family, delay) in delays {
            self.programming_duration.observe(*family, delay.as_secs_f64());
        }
    }

    pub(crate) fn on_failed(&self, step: Step) {
        self.failures.get_or_create(&[("step", step.name())]).inc();
        let by_family = match step {
            Step::Apply => &self.sync_failures,
            Step::Finish => &self.cleanup_failures,
            Step::Attach => return,
        };
        for (_, name) in FAMILIES {
            by_family.get_or_create(&[(IP_FAMILY, name)]).inc();
        }
    }

    /// A pass over the conntrack entries of a family.
    pub(crate) fn on_flow_pass(&self, family: IpFamily, took: Duration, deleted: usize) {
        self.flow_pass_duration.observe(family, took.as_secs_f64());
        let (_, name) = FAMILIES[usize::from(family == IpFamily::V6)];
        self.flows_deleted.get_or_create(&[(IP_FAMILY, name)]).inc_by(deleted as u64);
    }

    /// A request to the API server.
    pub(crate) fn on_request(&self, ApiRequest { method, host, code, took }: &ApiRequest) {
        let code = code.map_or_else(|| "<error>".to_owned(), |it| it.to_string());
        let labels = [("code", code), ("host", host.clone()), ("method", method.clone())];
        self.requests.get_or_create(&labels).inc();
        let labels = [("host", host.clone()), ("verb", method.clone())];
        self.request_duration.get_or_create(&labels).observe(took.as_secs_f64());
    }

    pub(crate) fn on_healthz(&self, ok: bool) {
        self.healthz.get_or_create(&code(ok)).inc();
    }

    pub(crate) fn on_livez(&self, ok: bool) {
        self.livez.get_or_create(&code(ok)).inc();
    }
}

fn code(ok: bool) -> Label {
    [("code", if ok { "200" } else { "503" })]
}

/// client-go's.
const REQUEST_BUCKETS: [f64; 12] = [0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0];

/// kube-proxy's: 0, 0.25 s, 0.5 s; steps of 1 s to a minute, of 5 s to two minutes, of 30 s to five.
fn programming_buckets() -> impl Iterator<Item = f64> {
    iter::once(0.0)
        .chain(linear_buckets(0.25, 0.25, 2))
        .chain(linear_buckets(1.0, 1.0, 59))
        .chain(linear_buckets(60.0, 5.0, 12))
        .chain(linear_buckets(120.0, 30.0, 7))
}

#[cfg(test)]
mod tests;
