//! The connections to the pages, limited for each group of listeners.

use std::fmt;

use listeners::{Connections, Limits, max_open_files};
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder};

use crate::metrics::MetricWriter;

/// For the kubelet: programs on this host only.
const PROBES: Limits = Limits { total: 256, per_source: 256 };
/// For load balancers, from anywhere; the health-check node ports included.
const HEALTH: Limits = Limits { total: 512, per_source: 64 };
/// For Prometheus.
const METRICS: Limits = Limits { total: 64, per_source: 16 };
/// For root on this host.
const STATUS: Limits = Limits { total: 32, per_source: 32 };
/// For browsers on this host: each opens up to six.
const UI: Limits = Limits { total: 48, per_source: 48 };

/// The connections to the pages. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct HttpConnections {
    pub(crate) probes: Connections,
    pub(crate) health: Connections,
    pub(crate) metrics: Connections,
    pub(crate) status: Connections,
    pub(crate) ui: Connections,
}

impl HttpConnections {
    pub(crate) fn new() -> Self {
        // All of them together take less than half of the files that this process may open.
        let most = max_open_files() / 16;
        let group =
            |name, limits: Limits| Connections::new(name, Limits { total: limits.total.min(most), ..limits });
        Self {
            probes: group("probes", PROBES),
            health: group("health pages", HEALTH),
            metrics: group("metrics pages", METRICS),
            status: group("status socket", STATUS),
            ui: group("page for people", UI),
        }
    }

    /// Each group, by its name in metrics.
    fn groups(&self) -> [(&'static str, &Connections); 5] {
        [
            ("probes", &self.probes),
            ("health", &self.health),
            ("metrics", &self.metrics),
            ("status", &self.status),
            ("ui", &self.ui),
        ]
    }
}

impl Collector for HttpConnections {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = MetricWriter::own(&mut encoder);
        let open = self.groups().map(|(name, it)| (name, it.count() as f64));
        out.gauges("http_connections", "pages", open)?;
        let closed = self.groups().map(|(name, it)| (name, it.closed()));
        out.counters("http_connections_closed", "pages", closed)
    }
}
