//! A source that follows a test server, and the resulting cluster state.
//!
//! Tests wait for conditions, never for time to pass.

use std::{
    ffi::OsString,
    sync::Arc,
    time::{Duration, Instant},
};

use api_server::{ApiServer, Fault, Resource, Settings, Verb, WatchList};
use model::{
    ServiceName,
    cluster::{ClusterChanges, ClusterState, EndpointSlice, Service, SliceName},
};
use serde_json::{Value, json};
use source::kube::{ClientConfig, KubeSource, Options, Timing};

const TIMEOUT: Duration = Duration::from_secs(120);

/// Short delays, for quick tests.
pub(crate) const QUICK: Timing = Timing {
    backoff: (Duration::from_millis(20), Duration::from_millis(200)),
    max_unreachable_delay: Duration::from_millis(100),
    timeout: Duration::from_millis(700),
    ping: (Duration::from_millis(100), Duration::from_millis(300)),
    unpinged_watch: Duration::from_secs(20),
    watch_slack: Duration::from_secs(15),
    idle: (Duration::from_secs(36), Duration::from_secs(15)),
    streaming_retry: Duration::from_secs(1),
    missing_retry: Duration::from_millis(200),
    renewal: Duration::from_millis(100),
};

pub(crate) fn service(name: &str, ip: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"clusterIP": ip, "clusterIPs": [ip], "ports": [{"port": 80}]},
    })
}

pub(crate) fn slice(name: &str, service: &str, addresses: &[&str]) -> Value {
    let endpoints: Vec<_> = addresses.iter().map(|it| json!({"addresses": [it]})).collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4", "ports": [{"port": 8080}], "endpoints": endpoints,
    })
}

pub(crate) fn node(name: &str, zone: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone}},
        "status": {"conditions": [{"type": "Ready", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}]},
    })
}

/// A server with the Service `web`, its slice and the Node `n1`.
pub(crate) fn server(settings: Settings) -> ApiServer {
    let server = ApiServer::start(settings).unwrap();
    server.set(node("n1", "a"));
    server.set(service("web", "10.96.0.10"));
    server.set(slice("web-1", "web", &["10.244.0.1"]));
    server
}

/// Such a server, and a source that has taken its first list over.
pub(crate) async fn synced(settings: Settings) -> (ApiServer, SourceTest) {
    let server = server(settings);
    let test = SourceTest::synced(&server).await;
    (server, test)
}

pub(crate) fn paging() -> Settings {
    Settings { watch_list: WatchList::Rejected, has_field_selectors: false, ..Settings::default() }
}

pub(crate) fn at(server: &ApiServer) -> ClientConfig {
    ClientConfig { server: Some(server.url()), ..ClientConfig::default() }
}

pub(crate) fn with_kubeconfig(path: impl Into<OsString>) -> ClientConfig {
    ClientConfig { kubeconfig: Some(path.into()), ..ClientConfig::default() }
}

pub(crate) fn status(code: u16, message: &str) -> Fault {
    Fault::Status { code, message: message.into(), retry_after: None }
}

/// Answers all lists and watches of a resource with an error, as often as given.
pub(crate) fn fail(server: &ApiServer, resource: Resource, times: usize, fault: &Fault) {
    for verb in [Verb::Watch, Verb::List] {
        server.inject_fault(resource, verb, times, fault.clone());
    }
}

/// For longer than any test.
pub(crate) const ALWAYS: usize = 1000;

pub(crate) fn options(client_config: ClientConfig) -> Options {
    Options { client_config, timing: QUICK, ..Options::default() }
}

/// A source, and the cluster state that it has handed over so far.
pub(crate) struct SourceTest {
    pub(crate) source: KubeSource,
    pub(crate) cluster: ClusterState,
}

impl SourceTest {
    pub(crate) fn follow(server: &ApiServer) -> Self {
        Self::start(&options(at(server)))
    }

    /// A source that has taken its first list over.
    pub(crate) async fn synced(server: &ApiServer) -> Self {
        Self::started(&options(at(server))).await
    }

    /// A source with these options that has taken its first list over.
    pub(crate) async fn started(options: &Options) -> Self {
        let mut test = Self::start(options);
        test.next().await;
        test
    }

    pub(crate) fn start(options: &Options) -> Self {
        Self { source: KubeSource::start(options).unwrap(), cluster: ClusterState::default() }
    }

    /// Waits for the next changes, applies them, and returns their number.
    pub(crate) async fn next(&mut self) -> usize {
        let changes = tokio::time::timeout(TIMEOUT, self.source.next()).await;
        let changes = changes.unwrap_or_else(|_| panic!("no changes; {:?}", self.source.resources()));
        self.apply(changes.expect("the source is running"))
    }

    /// Applies changes until the cluster state fulfils a condition.
    pub(crate) async fn until(&mut self, condition: impl Fn(&ClusterState) -> bool) {
        while !condition(&self.cluster) {
            self.next().await;
        }
    }

    /// Adds the Service `other`, and waits for it.
    pub(crate) async fn receives_other(&mut self, server: &ApiServer) {
        server.set(service("other", "10.96.0.11"));
        self.until(has_service("other")).await;
    }

    /// Applies changes until the source fulfils a condition.
    pub(crate) async fn wait_for(&mut self, mut condition: impl FnMut(&KubeSource) -> bool) {
        let start = Instant::now();
        while !condition(&self.source) {
            assert!(start.elapsed() < TIMEOUT, "{:?}", self.source.resources());
            if let Ok(changes) = tokio::time::timeout(Duration::from_millis(10), self.source.next()).await {
                self.apply(changes.expect("the source is running"));
            }
        }
    }

    /// Whether all required resources have been listed once.
    pub(crate) fn is_synced(&self) -> bool {
        self.source.resources().iter().all(|it| it.is_synced)
    }

    pub(crate) fn service(&self, name: &str) -> Option<Arc<Service>> {
        self.cluster.services.get(&ServiceName::new("default", name)).cloned()
    }

    pub(crate) fn slice(&self, name: &str) -> Option<Arc<EndpointSlice>> {
        let name = SliceName { namespace: "default".into(), name: name.into() };
        self.cluster.slice(&name).cloned()
    }

    fn apply(&mut self, changes: ClusterChanges) -> usize {
        let count = changes.len();
        self.cluster.apply(changes);
        count
    }
}

pub(crate) fn has_service(name: &str) -> impl Fn(&ClusterState) -> bool + use<> {
    let name = ServiceName::new("default", name);
    move |cluster| cluster.services.get(&name).is_some()
}

/// Whether the error of a resource contains all these words.
pub(crate) fn has_error(resource: usize, words: &'static [&'static str]) -> impl Fn(&KubeSource) -> bool {
    move |source| {
        let error = source.resources()[resource].error.clone().unwrap_or_default();
        words.iter().all(|it| error.contains(it))
    }
}
