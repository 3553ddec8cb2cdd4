//! What pages ask of other parts of the process.

use std::{collections::BTreeMap, fmt, net::SocketAddr, pin::Pin, sync::Arc};

use datapath::PortCounts;
use model::{
    Protocol, ServiceName,
    state::{Service, ServicePort},
};
use pipeline::NoReasons;
use publish::Watchers;
use serde_json::Value;
use tokio::sync::mpsc;

/// How pages get what is not reported; `None` where no part of the process has it. A call may take a while: none is made while
/// the state is locked, but for numbers.
#[derive(Default)]
pub struct Readers {
    /// What the process was started with: the pages `/config`, `/configz` and `/flagz`.
    pub configuration: Configuration,
    /// Whether this process redirects sockets; if not, only connections from outside are counted.
    pub has_sockets: bool,
    /// The newest lines of the log: the page `/log`.
    pub log: Option<Arc<dyn Fn() -> String + Send + Sync>>,
    /// The clients that watch the states of this process, which the page `/status` counts.
    pub watchers: Option<Watchers>,
    /// Reads the kernel's counters of service ports; pages omit them while that fails.
    pub counters: Option<Arc<dyn Fn() -> Option<PortCountLookup> + Send + Sync>>,
    /// Answers the page `/explain`: from the words of the question to an answer in JSON.
    pub explainer: Option<Explainer>,
    /// Answers the explanations of the page at `--ui`: as `explainer`, with what the kernel has for the connections of any client.
    pub kernel_explainer: Option<Explainer>,
    /// Starts what the page `/trace` serves: from filters to lines.
    pub tracer: Option<Arc<dyn Fn(TraceFilters) -> PendingTrace + Send + Sync>>,
}

impl fmt::Debug for Readers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Readers")
    }
}

/// What the process was started with.
#[derive(Clone, Debug, Default)]
pub struct Configuration {
    /// The value of every flag and its origin, as text.
    pub table: String,
    pub flags: BTreeMap<String, String>,
    /// The values as fields of a `KubeProxyConfiguration`.
    pub fields: Value,
}

/// Looks up counters at one moment.
pub trait CounterLookup {
    /// The counters of a service port for sockets; `None` for one that is not programmed.
    fn port(&self, service: &ServiceName, port: &str, protocol: Protocol) -> Option<PortCounts>;

    /// The sums over all ports of a Service, for sockets.
    fn total(&self, service: &Service) -> PortCounts {
        let mut sum = PortCounts::default();
        let ports = service.ports.iter().filter_map(|it| self.port(&service.name, &it.name, it.protocol));
        ports.for_each(|it| sum += it);
        sum
    }

    /// How many connections of a service port were redirected to an endpoint.
    fn endpoint(&self, service: &ServiceName, port: &str, protocol: Protocol, endpoint: SocketAddr) -> u64;

    /// How many connections and UDP flows to addresses that are reachable from outside the packet path has translated.
    fn external_connections(&self, _: &Service, _: &ServicePort) -> u64 {
        0
    }
}

pub type PortCountLookup = Box<dyn CounterLookup + Send>;

/// Answers a question in words.
pub type Explainer = Arc<dyn Fn(Vec<String>) -> PendingAnswer + Send + Sync>;

/// An answer as JSON, or why there is none.
pub type PendingAnswer = Pin<Box<dyn Future<Output = Result<String, NoReasons>> + Send>>;

/// The filters of a trace: names and values.
pub type TraceFilters = Vec<(String, String)>;

/// The lines of a trace, or why there is none.
pub type PendingTrace = Pin<Box<dyn Future<Output = Result<mpsc::Receiver<String>, String>> + Send>>;
