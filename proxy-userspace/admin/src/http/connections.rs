//! The connections to the pages, limited for each group of listeners.

use std::fmt;

use listeners::{Connections, Limits, max_open_files};
use metrics::MetricWriter;
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder};

use super::page_group::PageGroup;

/// The name of a group of listeners, and its limits.
fn limits(pages: PageGroup) -> (&'static str, Limits) {
    match pages {
        // For the kubelet: programs on this host only.
        PageGroup::Probes => ("probes", Limits { total: 256, per_source: 256 }),
        // For load balancers, from anywhere; the health-check node ports included.
        PageGroup::Health => ("health pages", Limits { total: 512, per_source: 64 }),
        // For Prometheus.
        PageGroup::Metrics => ("metrics pages", Limits { total: 64, per_source: 16 }),
        // For root on this host.
        PageGroup::Status => ("status socket", Limits { total: 32, per_source: 32 }),
        // For browsers on this host: each opens up to six.
        PageGroup::Ui => ("page for people", Limits { total: 48, per_source: 48 }),
    }
}

/// The connections to the pages. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct HttpConnections([Connections; PageGroup::ALL.len()]);

impl HttpConnections {
    pub(crate) fn new() -> Self {
        // All of them together take less than half of the files that this process may open.
        let most = max_open_files() / 16;
        Self(PageGroup::ALL.map(|it| {
            let (name, limits) = limits(it);
            Connections::new(name, Limits { total: limits.total.min(most), ..limits })
        }))
    }

    pub(crate) fn of(&self, pages: PageGroup) -> &Connections {
        &self.0[pages as usize]
    }
}

impl Collector for HttpConnections {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = MetricWriter::own(&mut encoder);
        let groups = || PageGroup::ALL.into_iter().map(|it| (it.name(), self.of(it)));
        out.gauges("http_connections", "pages", groups().map(|(name, it)| (name, it.count() as f64)))?;
        out.counters("http_connections_closed", "pages", groups().map(|(name, it)| (name, it.closed())))
    }
}
