//! Options of the command line.

/// Which Services are served, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// `--service-proxy-name`: serve only the Services with this value of the label; without it, only those without
    /// the label.
    pub service_proxy_name: Option<String>,
    /// Whether `spec.externalIPs` are served (deprecated by KEP-5707, on by default).
    pub external_ips: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { service_proxy_name: None, external_ips: true }
    }
}
