//! Which pages share an address, and their connections, limited for each group.

use std::fmt;

use listeners::{Connections, Limits, max_open_files};
use metrics::MetricWriter;
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder};

/// Pages that share an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageGroup {
    /// For the kubelet: the health pages at an address of their own, which nothing else can delay.
    Probes,
    /// For load balancers.
    Health,
    /// For Prometheus.
    Metrics,
    /// For the commands, at a Unix socket.
    Status,
    /// For people, on this host.
    Ui,
}

impl PageGroup {
    pub(crate) const ALL: [Self; 5] = [Self::Probes, Self::Health, Self::Metrics, Self::Status, Self::Ui];

    /// The name in metrics and in the log, the flag that sets the address, and the paths of the pages.
    const fn details(self) -> (&'static str, &'static str, &'static [&'static str]) {
        const HEALTH: &[&str] = &["/healthz", "/livez", "/readyz"];
        const METRICS: &[&str] =
            &["/metrics", "/metrics/slis", "/proxyMode", "/healthz", "/configz", "/flagz", "/statusz"];
        const STATUS: &[&str] = &["/status", "/state", "/explain", "/trace", "/metrics", "/config", "/log"];
        match self {
            Self::Probes => ("probes", "--probe-bind-address", HEALTH),
            Self::Health => ("health", "--healthz-bind-address", HEALTH),
            Self::Metrics => ("metrics", "--metrics-bind-address", METRICS),
            Self::Status => ("status", "--status-socket", STATUS),
            Self::Ui => ("ui", "--ui", &["/"]),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        self.details().0
    }

    pub fn flag(self) -> &'static str {
        self.details().1
    }

    pub fn paths(self) -> &'static [&'static str] {
        self.details().2
    }
}

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
