//! A server, a source that follows it, and the facts that come out.
//!
//! The one rule: tests wait for what must come, and never for time to pass.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use api_server::{ApiServer, Settings};
use model::{
    ServiceName,
    cluster::{ClusterState, EndpointSlice, Service, SliceName},
};
use serde_json::{Value, json};
use source::{
    ClusterChanges,
    kube::{ClientConfig, Health, KubeSource, Options, Timing},
};

const LIMIT: Duration = Duration::from_secs(30);

/// Quick to try again, so that tests are quick.
pub(crate) const QUICK: Timing = Timing {
    backoff: (Duration::from_millis(20), Duration::from_millis(200)),
    timeout: Duration::from_millis(700),
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

/// A server with `web` and its slice and `n1`.
pub(crate) fn server(settings: Settings) -> ApiServer {
    let server = ApiServer::start(settings).unwrap();
    server.set(node("n1", "a"));
    server.set(service("web", "10.96.0.10"));
    server.set(slice("web-1", "web", &["10.244.0.1"]));
    server
}

pub(crate) fn paging() -> Settings {
    Settings { has_watch_list: false, has_field_selectors: false, ..Settings::default() }
}

/// A source, and what it has said so far.
pub(crate) struct World {
    pub(crate) source: KubeSource,
    pub(crate) facts: ClusterState,
    pub(crate) health: Health,
}

impl World {
    pub(crate) fn follow(server: &ApiServer) -> Self {
        Self::start(&Options {
            client_config: ClientConfig { server: Some(server.url()), ..ClientConfig::default() },
            timing: QUICK,
            ..Options::default()
        })
    }

    pub(crate) fn start(options: &Options) -> Self {
        let source = KubeSource::start(options).unwrap();
        let health = source.health();
        Self { source, facts: ClusterState::default(), health }
    }

    /// Waits for the next changes, takes them over, and returns how many there are.
    pub(crate) async fn next(&mut self) -> usize {
        let changes = tokio::time::timeout(LIMIT, self.source.next()).await;
        let changes = changes.unwrap_or_else(|_| panic!("nothing new; {:?}", self.health.resources()));
        self.take(changes.expect("the source runs"))
    }

    /// Takes changes over until it is so.
    pub(crate) async fn until(&mut self, is_so: impl Fn(&ClusterState) -> bool) {
        while !is_so(&self.facts) {
            self.next().await;
        }
    }

    /// Waits until the server's part in it is so, while the source says whatever it says.
    pub(crate) async fn eventually(&mut self, mut is_so: impl FnMut(&Health) -> bool) {
        let began = Instant::now();
        while !is_so(&self.health) {
            assert!(began.elapsed() < LIMIT, "{:?}", self.health.resources());
            if let Ok(changes) = tokio::time::timeout(Duration::from_millis(10), self.source.next()).await {
                self.take(changes.expect("the source runs"));
            }
        }
    }

    pub(crate) fn service(&self, name: &str) -> Option<Arc<Service>> {
        self.facts.service(&ServiceName::new("default", name)).cloned()
    }

    pub(crate) fn slice(&self, name: &str) -> Option<Arc<EndpointSlice>> {
        let name = SliceName { namespace: "default".into(), name: name.into() };
        self.facts.slice(&name).cloned()
    }

    fn take(&mut self, changes: ClusterChanges) -> usize {
        let count = changes.services.len() + changes.slices.len() + changes.nodes.len();
        for (name, it) in changes.services {
            match it {
                Some(it) => drop(self.facts.set_service(it)),
                None => drop(self.facts.delete_service(&name)),
            }
        }
        for (name, it) in changes.slices {
            match it {
                Some(it) => drop(self.facts.set_slice(it)),
                None => drop(self.facts.delete_slice(&name)),
            }
        }
        for (name, it) in changes.nodes {
            match it {
                Some(it) => drop(self.facts.set_node(it)),
                None => drop(self.facts.delete_node(&name)),
            }
        }
        count
    }
}

pub(crate) fn has_service(name: &str) -> impl Fn(&ClusterState) -> bool + use<> {
    let name = ServiceName::new("default", name);
    move |facts| facts.service(&name).is_some()
}

/// Whether something is wrong with a kind, in words that contain these.
pub(crate) fn complains(kind: usize, words: &'static [&'static str]) -> impl Fn(&Health) -> bool {
    move |health| {
        let error = health.resources()[kind].error.clone().unwrap_or_default();
        words.iter().all(|it| error.contains(it))
    }
}
