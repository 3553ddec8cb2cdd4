//! The page `/metrics`: kube-proxy's names, so that dashboards and alerts go on working, and our own.
//!
//! Invariant: `docs/metrics.md` lists every metric that is served and no other; a test compares the two.
//! What happens is counted here as it happens; what is, is read from the record when somebody asks.

mod gauges;
mod process;
mod text;

use std::{
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

use datapath::{ApplyReport, AttachStatus};
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

use crate::{Role, lock, record::Record, tally::Changes};

/// The prefix of our own.
pub(crate) const OWN: &str = "kube_proxy_ebpf";
/// The prefix of kube-proxy's.
pub(crate) const KUBE_PROXY: &str = "kubeproxy";

/// A label and its value.
type Label = [(&'static str, &'static str); 1];

#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    sync: Histogram,
    full_sync: Histogram,
    partial_sync: Histogram,
    programming: Histogram,
    endpoint_changes: Counter,
    service_changes: Counter,
    healthz: Family<Label, Counter>,
    livez: Family<Label, Counter>,
    apply: Histogram,
    failures: Family<Label, Counter>,
    retries: Counter,
    losses: Counter,
    ended: Counter,
}

impl Metrics {
    pub(crate) fn new(record: Arc<Mutex<Record>>) -> Self {
        // 1 ms to 16 s, as kube-proxy has it.
        let sync = || Histogram::new(exponential_buckets(0.001, 2.0, 15));
        let mut it = Self {
            registry: Registry::default(),
            sync: sync(),
            full_sync: sync(),
            partial_sync: sync(),
            programming: Histogram::new(programming_buckets()),
            endpoint_changes: Counter::default(),
            service_changes: Counter::default(),
            healthz: Family::default(),
            livez: Family::default(),
            // 50 µs to 6.5 s.
            apply: Histogram::new(exponential_buckets(0.000_05, 2.0, 18)),
            failures: Family::default(),
            retries: Counter::default(),
            losses: Counter::default(),
            ended: Counter::default(),
        };
        for code in ["200", "503"] {
            drop(it.healthz.get_or_create(&[("code", code)]));
            drop(it.livez.get_or_create(&[("code", code)]));
        }
        for doing in Step::ALL {
            drop(it.failures.get_or_create(&[("step", doing.name())]));
        }
        let role = lock(&record).role;
        it.register(role);
        it.registry.register_collector(Box::new(gauges::Gauges(record)));
        it.registry.register_collector(Box::new(process::Process));
        it
    }

    fn register(&mut self, role: Role) {
        let theirs = self.registry.sub_registry_with_prefix(KUBE_PROXY);
        theirs.register("proxy_healthz", "Cumulative proxy healthz HTTP status", self.healthz.clone());
        theirs.register("proxy_livez", "Cumulative proxy livez HTTP status", self.livez.clone());
        if role == Role::Brain {
            return;
        }
        theirs.register(
            "sync_proxy_rules_duration_seconds",
            "SyncProxyRules latency in seconds",
            self.sync.clone(),
        );
        theirs.register(
            "sync_full_proxy_rules_duration_seconds",
            "SyncProxyRules latency in seconds for full resyncs",
            self.full_sync.clone(),
        );
        theirs.register(
            "sync_partial_proxy_rules_duration_seconds",
            "SyncProxyRules latency in seconds for partial resyncs",
            self.partial_sync.clone(),
        );
        theirs.register(
            "network_programming_duration_seconds",
            "In Cluster Network Programming Latency in seconds",
            self.programming.clone(),
        );
        theirs.register(
            "sync_proxy_rules_endpoint_changes",
            "Cumulative proxy rules Endpoint changes",
            self.endpoint_changes.clone(),
        );
        theirs.register(
            "sync_proxy_rules_service_changes",
            "Cumulative proxy rules Service changes",
            self.service_changes.clone(),
        );
        let own = self.registry.sub_registry_with_prefix(OWN);
        own.register(
            "apply_duration_seconds",
            "Time from a state in hand to the state in force",
            self.apply.clone(),
        );
        own.register("failures", "Steps that failed and were tried again", self.failures.clone());
        own.register(
            "apply_retries",
            "States that were taken up again after a failure",
            self.retries.clone(),
        );
        own.register(
            "program_losses",
            "Times that somebody had taken our programs off the cgroup",
            self.losses.clone(),
        );
        own.register(
            "udp_sockets_ended",
            "Connected UDP sockets that were ended because their endpoint did not serve any more",
            self.ended.clone(),
        );
    }

    /// Everything, in Prometheus' text format.
    pub(crate) fn text(&self) -> Result<String, fmt::Error> {
        let mut openmetrics = String::new();
        encoding::text::encode(&mut openmetrics, &self.registry)?;
        Ok(text::classic(&openmetrics))
    }

    pub(crate) fn changed(&self, changes: Changes) {
        self.endpoint_changes.inc_by(changes.endpoints as u64);
        self.service_changes.inc_by(changes.services as u64);
    }

    pub(crate) fn taken(&self, again: bool) {
        self.retries.inc_by(u64::from(again));
    }

    /// `triggers`: how long ago the changes happened that have come into force.
    pub(crate) fn in_force(&self, report: &ApplyReport, took: Duration, triggers: &[Duration]) {
        let seconds = took.as_secs_f64();
        self.sync.observe(seconds);
        self.apply.observe(seconds);
        if report.is_full { &self.full_sync } else { &self.partial_sync }.observe(seconds);
        for it in triggers {
            self.programming.observe(it.as_secs_f64());
        }
    }

    pub(crate) fn failed(&self, doing: Step) {
        self.failures.get_or_create(&[("step", doing.name())]).inc();
    }

    pub(crate) fn looked(&self, hooks: Result<&AttachStatus, &str>) {
        self.losses.inc_by(u64::from(hooks.is_ok_and(|it| !it.is_complete())));
    }

    pub(crate) fn ended(&self, sockets: usize) {
        self.ended.inc_by(sockets as u64);
    }

    pub(crate) fn asked_healthz(&self, ok: bool) {
        self.healthz.get_or_create(&code(ok)).inc();
    }

    pub(crate) fn asked_livez(&self, ok: bool) {
        self.livez.get_or_create(&code(ok)).inc();
    }
}

fn code(ok: bool) -> Label {
    [("code", if ok { "200" } else { "503" })]
}

/// kube-proxy's: 0, 0.25 s, 0.5 s, then seconds, five seconds from a minute on, half minutes from two to five.
fn programming_buckets() -> impl Iterator<Item = f64> {
    std::iter::once(0.0)
        .chain(linear_buckets(0.25, 0.25, 2))
        .chain(linear_buckets(1.0, 1.0, 59))
        .chain(linear_buckets(60.0, 5.0, 12))
        .chain(linear_buckets(120.0, 30.0, 7))
}

#[cfg(test)]
mod tests;
