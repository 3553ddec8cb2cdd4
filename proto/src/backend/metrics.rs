//! The metrics of a backend, by kube-proxy's names where it has them, and the answer to a health check.

use std::{
    sync::atomic::AtomicU64,
    time::{Duration, SystemTime},
};

use hyper::StatusCode;
use prometheus_client::{
    encoding::text::encode,
    metrics::{counter::Counter, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use tokio::sync::watch;

use super::http::Answer;

#[derive(Debug)]
pub(super) struct Metrics {
    registry: Registry,
    duration: Histogram,
    last_applied: Gauge<f64, AtomicU64>,
    failures: Counter,
    repairs: Counter,
    services: Gauge,
    not_served: Gauge,
    is_connected: Gauge,
    health: watch::Sender<Health>,
}

/// Whether the node is as the newest state says.
#[derive(Debug)]
enum Health {
    /// No state was received yet.
    Waiting,
    Applied,
    /// It could not be applied, for this reason.
    Failed(String),
}

impl Metrics {
    pub(super) fn new() -> Self {
        let mut it = Self {
            registry: Registry::with_prefix("kubeproxy"),
            // 1 ms to 16 s.
            duration: Histogram::new((0..15).map(|it| 0.001 * f64::from(1 << it))),
            last_applied: Gauge::default(),
            failures: Counter::default(),
            repairs: Counter::default(),
            services: Gauge::default(),
            not_served: Gauge::default(),
            is_connected: Gauge::default(),
            health: watch::Sender::new(Health::Waiting),
        };
        let all = &mut it.registry;
        all.register("sync_proxy_rules_duration_seconds", "Time to apply a state", it.duration.clone());
        all.register(
            "sync_proxy_rules_last_timestamp_seconds",
            "When a state was last applied, in seconds since the Unix epoch",
            it.last_applied.clone(),
        );
        all.register("apply_failures", "Applies that failed, and were tried again", it.failures.clone());
        all.register("repairs", "Times that something else had changed what was applied", it.repairs.clone());
        all.register("services", "Services of the newest state", it.services.clone());
        all.register("not_served", "Parts of the newest state that are not served", it.not_served.clone());
        all.register("brain_connected", "Whether a brain is followed: 1 or 0", it.is_connected.clone());
        it
    }

    pub(super) fn applied(&self, took: Duration, services: usize, not_served: usize) {
        self.duration.observe(took.as_secs_f64());
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.last_applied.set(now.as_secs_f64());
        self.services.set(i64::try_from(services).unwrap_or(i64::MAX));
        self.not_served.set(i64::try_from(not_served).unwrap_or(i64::MAX));
        self.health.send_replace(Health::Applied);
    }

    pub(super) fn failed(&self, error: String) {
        self.failures.inc();
        self.health.send_replace(Health::Failed(error));
    }

    pub(super) fn repaired(&self) {
        self.repairs.inc();
    }

    /// The page /healthz. An outage of the brain is said, and is no failure: the last state stays active.
    pub(super) fn healthz(&self, outage: Option<&str>) -> Answer {
        let (status, mut body) = match &*self.health.borrow() {
            Health::Waiting => (StatusCode::SERVICE_UNAVAILABLE, "no state was received yet".to_owned()),
            Health::Applied => (StatusCode::OK, "ok".to_owned()),
            Health::Failed(error) => {
                (StatusCode::SERVICE_UNAVAILABLE, format!("cannot apply a state: {error}"))
            }
        };
        if let Some(outage) = outage {
            body += "\nthe brain cannot be followed: ";
            body += outage;
        }
        Answer { status, content_type: "text/plain", body: body + "\n" }
    }

    /// The page /metrics, in the format of OpenMetrics.
    pub(super) fn page(&self, is_connected: bool) -> Answer {
        self.is_connected.set(is_connected.into());
        let mut body = String::new();
        encode(&mut body, &self.registry).expect("a string takes any text");
        let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        Answer { status: StatusCode::OK, content_type, body }
    }
}
