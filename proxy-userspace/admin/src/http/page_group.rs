//! Which pages share an address.

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
    /// All of them.
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

    /// The flag that sets their address.
    pub fn flag(self) -> &'static str {
        self.details().1
    }

    /// The paths of its pages.
    pub fn paths(self) -> &'static [&'static str] {
        self.details().2
    }
}
