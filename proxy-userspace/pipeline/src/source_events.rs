//! The updates of any source, in one form.
//!
//! Invariant: only the newest update is kept; nothing queues.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use model::{cluster::ClusterState, state::NodeState};
use source::{
    ClusterChanges, Snapshots,
    api::{ApiSource, Update},
    file::FileSource,
    kube::{self, KubeSource},
};
use tokio::{sync::watch, time::sleep};

use crate::{
    config::{Error, SourceConfig},
    observer::{Observer, Stage, SyncStatus},
};

/// How often the status of the API server's watches is reported.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);

/// Names of sources in reports. An API server is reported by resource instead.
const FILE: &str = "file";
const API: &str = "api";

/// An update of a source.
pub(crate) enum SourceEvent {
    /// The whole cluster state.
    Cluster(Arc<ClusterState>),
    /// Changes since the last event; the first ones are the whole cluster state.
    Changes(ClusterChanges),
    /// The state of this node, computed by another brain.
    Node(NodeState),
}

/// A source that runs.
#[derive(Debug)]
pub(crate) enum RunningSource {
    /// Manifests.
    File(FileSource),
    /// Another brain.
    Api(ApiSource),
    /// An API server.
    Kube(KubeSource),
}

/// Receives the events of a source.
pub(crate) enum SourceEvents<'a> {
    File(Snapshots),
    Api(watch::Receiver<Option<Update>>),
    Kube(&'a KubeSource),
}

impl RunningSource {
    pub(crate) fn start(config: SourceConfig, service_proxy_name: Option<String>) -> Result<Self, Error> {
        Ok(match config {
            SourceConfig::File(path) => Self::File(FileSource::start(path)?),
            SourceConfig::Api(client) => Self::Api(ApiSource::start(client)),
            // All nodes are watched: node ports are reachable at the addresses of every node.
            SourceConfig::Kube(client_config) => Self::Kube(KubeSource::start(&kube::Options {
                client_config,
                service_proxy_name,
                ..Default::default()
            })?),
        })
    }

    /// The source's events, including the newest one that is there already.
    pub(crate) fn events(&self, observer: &impl Observer) -> SourceEvents<'_> {
        let (name, events) = match self {
            Self::File(it) => (FILE, SourceEvents::File(from_now(it.snapshots()))),
            Self::Api(it) => (API, SourceEvents::Api(from_now(it.updates()))),
            Self::Kube(it) => {
                report(it, observer);
                return SourceEvents::Kube(it);
            }
        };
        observer.source(name, SyncStatus::default());
        events
    }
}

/// Reports how the watches of an API server are doing, by resource.
fn report(source: &KubeSource, observer: &impl Observer) {
    for it in source.health().resources() {
        let last_contact = it.last_contact.map(|it| SystemTime::now() - it.elapsed());
        observer.source(it.resource, SyncStatus { is_synced: it.is_synced, last_contact, error: it.error });
    }
}

/// The receiver, for which the present value counts as changed.
fn from_now<T>(mut receiver: watch::Receiver<T>) -> watch::Receiver<T> {
    receiver.mark_changed();
    receiver
}

impl SourceEvents<'_> {
    /// Waits for the next event; `None` if the source has ended. Cancel-safe.
    pub(crate) async fn next(&mut self, observer: &impl Observer) -> Option<SourceEvent> {
        loop {
            let event = match self {
                Self::File(snapshots) => {
                    snapshots.changed().await.ok()?;
                    snapshots.borrow_and_update().as_ref().map(|snapshot| {
                        let error = Some(snapshot.problems.join("; ")).filter(|it| !it.is_empty());
                        observer.source(FILE, SyncStatus { is_synced: true, last_contact: None, error });
                        observer.rejected(Stage::Source, snapshot.rejected.clone());
                        SourceEvent::Cluster(Arc::clone(&snapshot.cluster))
                    })
                }
                Self::Api(updates) => {
                    updates.changed().await.ok()?;
                    updates.borrow_and_update().clone().map(|update| {
                        let last_contact = Some(SystemTime::now());
                        observer.source(API, SyncStatus { is_synced: true, last_contact, error: None });
                        match update {
                            Update::Cluster(cluster) => SourceEvent::Cluster(cluster),
                            Update::Node(state) => SourceEvent::Node(state),
                        }
                    })
                }
                Self::Kube(source) => {
                    let changes = tokio::select! {
                        changes = source.next() => Some(changes?),
                        () = sleep(STATUS_INTERVAL) => None,
                    };
                    report(source, observer);
                    changes.map(SourceEvent::Changes)
                }
            };
            if event.is_some() {
                return event;
            }
        }
    }
}
