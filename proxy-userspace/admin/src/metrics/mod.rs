//! The page `/metrics`: kube-proxy's names, so that existing dashboards and alerts continue to work, and our own.
//!
//! Invariant: `docs/metrics.md` lists exactly the metrics that are served; a test compares the two.
//! Here is what only this crate knows; every other part of the process registers what it measures (`Admin::registry`).

mod gauges;
mod process;
mod slis;
mod text;

use std::{
    fmt::{self, Write as _},
    iter,
    sync::Arc,
    time::Duration,
};

use datapath::{ApplyReport, PortCounts};
use metrics::{Histograms, Label, add, by_family, help, histograms, ip_family, sync_durations, with_series};
use model::{Family as IpFamily, ServiceName, state::Services};
use parking_lot::Mutex;
use prometheus_client::{
    encoding,
    metrics::{
        counter::Counter,
        family::Family,
        histogram::{Histogram, exponential_buckets, linear_buckets},
    },
    registry::Registry,
};

use self::slis::Slis;
use crate::{
    http::{HttpConnections, body::Parts},
    state::counters::{NewestReading, Reading},
    state::totals::ChangeCounts,
    state::{AdminState, Role},
};

pub(crate) struct Metrics {
    pub(crate) registry: Mutex<Registry>,
    state: Arc<Mutex<AdminState>>,
    pub(crate) counters: NewestReading,
    pub(crate) slis: Slis,
    pub(crate) healthz: Family<Label, Counter>,
    pub(crate) livez: Family<Label, Counter>,
    pub(crate) datapath: DatapathMetrics,
}

/// What a process that programs the kernel counts of its states.
pub(crate) struct DatapathMetrics {
    sync_duration: Histograms<Label>,
    full_sync_duration: Histograms<Label>,
    partial_sync_duration: Histograms<Label>,
    programming_duration: Histograms<Label>,
    endpoint_changes: Counter,
    service_changes: Counter,
    apply_duration: Histogram,
    pub(crate) apply_retries: Counter,
}

impl Metrics {
    pub(crate) fn new(state: Arc<Mutex<AdminState>>, connections: HttpConnections) -> Self {
        let (mut registry, mut unserved) = (Registry::default(), Registry::default());
        registry.register_collector(Box::new(gauges::Gauges(Arc::clone(&state))));
        registry.register_collector(Box::new(connections));
        registry.register_collector(Box::new(process::Process));
        let codes = || with_series(Family::default(), [true, false].map(code));
        let is_backend = state.lock().role == Role::Backend;
        Self {
            state,
            counters: NewestReading::default(),
            slis: Slis::new(),
            healthz: add(&mut registry, "kubeproxy_proxy_healthz", codes()),
            livez: add(&mut registry, "kubeproxy_proxy_livez", codes()),
            datapath: DatapathMetrics::new(if is_backend { &mut registry } else { &mut unserved }),
            registry: Mutex::new(registry),
        }
    }

    /// The parts of the page: all metrics in Prometheus' text format.
    pub(crate) fn parts(&self) -> Result<Parts, fmt::Error> {
        let (role, served) = {
            let state = self.state.lock();
            (state.role, state.served())
        };
        let mut openmetrics = String::new();
        encoding::text::encode(&mut openmetrics, &self.registry.lock())?;
        let parts = iter::once(text::from_openmetrics(&openmetrics));
        if role == Role::Brain {
            return Ok(Box::new(parts.map(Ok)));
        }
        let services = served.map(|it| it.state.services.clone()).unwrap_or_default();
        let ports = service_ports(services, self.counters.read(&self.state));
        Ok(Box::new(parts.chain(ports).map(Ok)))
    }

    /// The page as a whole.
    #[cfg(test)]
    pub(crate) fn text(&self) -> Result<String, String> {
        self.parts().map_err(|it| it.to_string())?.collect()
    }
}

impl DatapathMetrics {
    fn new(registry: &mut Registry) -> Self {
        let programming = with_series(histograms(|| Histogram::new(programming_buckets())), by_family());
        // 50 µs to 6.5 s.
        let apply = Histogram::new(exponential_buckets(0.000_05, 2.0, 18));
        let it = registry;
        Self {
            sync_duration: add(it, "kubeproxy_sync_proxy_rules_duration_seconds", sync_durations()),
            full_sync_duration: add(it, "kubeproxy_sync_full_proxy_rules_duration_seconds", sync_durations()),
            partial_sync_duration: add(
                it,
                "kubeproxy_sync_partial_proxy_rules_duration_seconds",
                sync_durations(),
            ),
            programming_duration: add(it, "kubeproxy_network_programming_duration_seconds", programming),
            endpoint_changes: add(it, "kubeproxy_sync_proxy_rules_endpoint_changes", Counter::default()),
            service_changes: add(it, "kubeproxy_sync_proxy_rules_service_changes", Counter::default()),
            apply_duration: add(it, "kube_proxy_ebpf_apply_duration_seconds", apply),
            apply_retries: add(it, "kube_proxy_ebpf_apply_retries", Counter::default()),
        }
    }

    pub(crate) fn on_published(&self, changes: ChangeCounts) {
        self.endpoint_changes.inc_by(changes.endpoints as u64);
        self.service_changes.inc_by(changes.services as u64);
    }

    /// `delays`: the time from each change in the cluster until it was active.
    pub(crate) fn on_applied(&self, report: &ApplyReport, took: Duration, delays: &[(IpFamily, Duration)]) {
        let seconds = took.as_secs_f64();
        self.apply_duration.observe(seconds);
        let by_kind = if report.is_full { &self.full_sync_duration } else { &self.partial_sync_duration };
        for it in by_family() {
            self.sync_duration.get_or_create(&it).observe(seconds);
            by_kind.get_or_create(&it).observe(seconds);
        }
        for (family, delay) in delays {
            self.programming_duration.get_or_create(&ip_family(*family)).observe(delay.as_secs_f64());
        }
    }
}

/// The kernel's counters of each service port, except zeros: the headers of each counter, and the samples of each Service.
///
/// They grow with the number of Services, and so they are written Service by Service, and not by the library.
fn service_ports(services: Services, reading: Arc<Reading>) -> impl Iterator<Item = String> + Send {
    PortCounts::COUNTERS.into_iter().flat_map(move |(name, values)| {
        let header = format!("# HELP {name} {}\n# TYPE {name} counter\n", help(name));
        let reading = Arc::clone(&reading);
        let samples = services.clone().into_values().map(move |it| {
            let mut lines = String::new();
            reading.each_port(&it, |port, counts| {
                let values = values.iter().map(|(way, value)| (*way, value(&counts)));
                // Most nodes use few Services.
                for (way, value) in values.filter(|(_, value)| *value != 0) {
                    let way = if way.is_empty() { String::new() } else { format!(",way=\"{way}\"") };
                    // Neither names nor protocols have characters that would need an escape.
                    let ServiceName { namespace, name: service } = &it.service.name;
                    let (port, protocol) = (&port.name, port.protocol);
                    // Writing to a string cannot fail.
                    let _ = writeln!(
                        lines,
                        "{name}{{namespace=\"{namespace}\",service=\"{service}\",port=\"{port}\",\
                         protocol=\"{protocol}\"{way}}} {value}"
                    );
                }
            });
            lines
        });
        iter::once(header).chain(samples)
    })
}

/// The label of a health page's status.
pub(crate) fn code(ok: bool) -> Label {
    [("code", if ok { "200" } else { "503" })]
}

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
