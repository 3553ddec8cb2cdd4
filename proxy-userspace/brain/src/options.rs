//! Options of the command line.

use model::state::ExternalForwarding;

/// Which Services are served, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// `--service-proxy-name`: serve only the Services with this value of the label; without it, only those without
    /// the label.
    pub service_proxy_name: Option<String>,
    /// Whether `spec.externalIPs` are served (deprecated by KEP-5707, on by default).
    pub external_ips: bool,
    /// `--max-namespace-entries`: how many frontends and endpoints, times their ports, the Services of a namespace may have.
    pub max_namespace_entries: u64,
    /// `--external-forwarding`: what becomes of packets from outside to Services without the annotation.
    pub external_forwarding: ExternalForwarding,
}

/// 50,000 Services of five endpoints in one namespace fit, and so do their tables into the memory of the manifests. A change of
/// a Service that takes all of it delays others by about 40 ms (docs/performance.md).
pub const DEFAULT_MAX_NAMESPACE_ENTRIES: u64 = 320_000;

impl Default for Options {
    fn default() -> Self {
        Self {
            service_proxy_name: None,
            external_ips: true,
            max_namespace_entries: DEFAULT_MAX_NAMESPACE_ENTRIES,
            external_forwarding: ExternalForwarding::default(),
        }
    }
}
