//! The source `kube`: an API server that is watched.
//!
//! Invariant: nothing is handed over before Services, EndpointSlices and Nodes have all been listed once. After that the
//! last state stays active during a failure of any length, and what is listed again is compared with it.
//! ServiceCIDRs and Pods are optional: the first state waits for them for a moment only, and a cluster without them is served.

mod apiserver_service;
mod backoff;
mod client_config;
mod event_recorder;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod http_proxy;
mod list_items;
mod options;
mod outage;
mod reflector;
mod renewed_credentials;
mod request_metrics;
mod resource;
mod server_check;
mod shared;
mod shared_client;
mod store;
mod timing;
mod watch_error;
mod watch_stream;

use std::sync::Arc;

use model::{Rejections, cluster::ClusterChanges};
use tokio::{runtime::Handle, sync::Mutex, task::JoinSet};

use self::{reflector::Reflector, resource::RESOURCES, shared::Shared, shared_client::SharedClient};

pub use client_config::{ByteStream, ClientConfig, ClientConfigError, Connector, connect_with};
pub use event_recorder::{EventRecorder, ServiceEvent};
pub use options::{Options, WatchedPods};
pub use request_metrics::RequestMetrics;
pub use shared::ResourceStatus;
pub use timing::Timing;

/// A running source; it stops when it is dropped.
#[derive(Debug)]
pub struct KubeSource {
    shared: Arc<Shared>,
    client: Arc<SharedClient>,
    runtime: Handle,
    pub requests: RequestMetrics,
    /// They run forever.
    tasks: Mutex<JoinSet<()>>,
}

impl KubeSource {
    /// Starts to follow an API server, which need not be reachable yet.
    ///
    /// Must be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// If the configuration of the client is unusable.
    pub fn start(options: &Options) -> Result<Self, ClientConfigError> {
        let (server, client) = SharedClient::new(&options.client_config, options.timing)?;
        tracing::info!(%server, "following the API server");
        let client = Arc::new(client);
        let shared = Arc::new(Shared::new(&server));
        let mut tasks = JoinSet::new();
        for resource in &RESOURCES {
            match resource.selectors(options) {
                Some(selectors) => {
                    let reflector = Reflector::new(options, &client, resource, selectors, &shared);
                    tasks.spawn(reflector.run());
                }
                None => shared.missing(resource.index()),
            }
        }
        tasks.spawn(server_check::run(Arc::clone(&client), Arc::clone(&shared), options.timing));
        let requests = options.client_config.requests.clone();
        Ok(Self { shared, client, runtime: Handle::current(), requests, tasks: Mutex::new(tasks) })
    }

    /// Waits for changes; the first ones are the whole cluster state, never a part of it. `None` if the source has
    /// failed. Cancel-safe.
    pub async fn next(&self) -> Option<ClusterChanges> {
        tokio::select! {
            changes = self.shared.next() => Some(changes),
            _ = async { self.tasks.lock().await.join_next().await } => None,
        }
    }

    /// Posts Events of the node with this name to the same API server.
    pub fn event_recorder(&self, node: &str) -> EventRecorder {
        EventRecorder::new(Arc::clone(&self.client), self.runtime.clone(), node)
    }

    /// The rejected parts of all objects, if they have changed since the last call.
    pub fn take_rejected(&self) -> Option<Rejections> {
        self.shared.take_rejected()
    }

    /// The status of the watches of Services, EndpointSlices and Nodes, at any time while the source runs.
    pub fn resources(&self) -> [ResourceStatus; 3] {
        self.shared.resources()
    }

    /// The URL of the API server.
    pub fn server(&self) -> &str {
        &self.shared.server
    }
}
