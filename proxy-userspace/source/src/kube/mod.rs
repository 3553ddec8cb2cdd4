//! The source `kube`: an API server that is watched.
//!
//! Invariant: nothing is handed over before Services, EndpointSlices and Nodes have all been listed once. After that the
//! last state stays active during a failure of any length, and what is listed again is compared with it.

mod apiserver_holddown;
mod backoff;
mod client_config;
mod event_recorder;
mod options;
mod reflector;
mod resource;
mod shared;
mod status;
mod store;
mod watch_error;
mod watch_stream;

use std::sync::Arc;

use tokio::task::JoinSet;

use self::{reflector::Reflector, shared::Shared};
use crate::{
    ClusterChanges,
    kube_types::objects::{EndpointSlice, Node, Service},
};

pub use client_config::{ClientConfig, ClientConfigError};
pub use event_recorder::{EventRecorder, WarningEvent};
pub use options::{Options, Timing};
pub use shared::Health;
pub use status::ResourceStatus;

/// A running source; it stops when it is dropped.
#[derive(Debug)]
pub struct KubeSource {
    shared: Arc<Shared>,
    _reflectors: JoinSet<()>,
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
        let (server, client) = options.client_config.client()?;
        tracing::info!("following the API server at {server}");
        let address = server.host().and_then(|it| it.trim_matches(['[', ']']).parse().ok());
        let shared = Arc::new(Shared::new(address));
        let [services, slices, nodes] = options.selectors();
        let mut reflectors = JoinSet::new();
        reflectors.spawn(Reflector::<Service>::new(options, &client, services, &shared).run());
        reflectors.spawn(Reflector::<EndpointSlice>::new(options, &client, slices, &shared).run());
        reflectors.spawn(Reflector::<Node>::new(options, &client, nodes, &shared).run());
        Ok(Self { shared, _reflectors: reflectors })
    }

    /// Waits for changes; the first ones are the whole cluster state, never a part of it. `None` if the source has
    /// failed. Cancel-safe.
    pub async fn next(&self) -> Option<ClusterChanges> {
        self.shared.next().await
    }

    /// The current status of the watches, at any time while the source runs.
    pub fn health(&self) -> Health {
        Health(Arc::clone(&self.shared))
    }
}
