//! The updates of any source, in one form.
//!
//! Invariant: only the newest update is kept; nothing queues.

use std::time::{Duration, SystemTime};

use listeners::RuntimeThread;
use model::{RequestedMetadata, cluster::ClusterChanges};
use source::{
    api::{ApiSource, Update},
    file::{FileSource, FileUpdate},
    kube::{self, KubeSource},
};
use tokio::{sync::watch, time::sleep};

use crate::{
    config::{Error, SourceConfig},
    observer::{Observer, Stage, SyncStatus},
};

/// How often the status of the API server's watches is reported.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);

/// For names that are looked up and credentials that are read again, in a thread of the source.
const MAX_BLOCKING_THREADS: usize = 2;

/// Names of sources in reports. An API server is reported by resource instead.
const FILE: &str = "file";
const API: &str = "api";

pub(crate) enum SourceUpdate {
    /// Changes since the last update; the first ones are the whole cluster state.
    Changes(ClusterChanges),
    /// What another brain reports.
    Api(Update),
}

#[derive(Debug)]
pub(crate) enum RunningSource {
    File(FileSource),
    Api(ApiSource),
    Kube {
        source: KubeSource,
        /// The thread in which it is followed.
        _thread: Option<RuntimeThread>,
    },
}

pub(crate) enum SourceUpdates<'a> {
    File(&'a FileSource),
    Api {
        updates: watch::Receiver<Option<Update>>,
        outage: watch::Receiver<Option<String>>,
        status: SyncStatus,
    },
    Kube(&'a KubeSource),
}

impl RunningSource {
    pub(crate) fn start(
        config: SourceConfig,
        node: &str,
        service_proxy_name: Option<String>,
        service_metadata: RequestedMetadata,
    ) -> Result<Self, Error> {
        Ok(match config {
            SourceConfig::File(path) => Self::File(FileSource::start(path, service_metadata)?),
            SourceConfig::Api(client) => Self::Api(ApiSource::start(client, service_metadata)),
            SourceConfig::Kube { client_config, all_nodes, pods, own_thread } => {
                let options = kube::Options {
                    client_config,
                    service_proxy_name,
                    service_metadata,
                    node: (!all_nodes).then(|| node.to_owned()),
                    pods,
                    ..Default::default()
                };
                let start_thread = || RuntimeThread::start("source", MAX_BLOCKING_THREADS);
                let thread = own_thread.then(start_thread).transpose().map_err(Error::Thread)?;
                let _context = thread.as_ref().map(|it| it.handle.enter());
                Self::Kube { source: KubeSource::start(&options)?, _thread: thread }
            }
        })
    }

    /// The source's updates, including the newest one that is there already.
    pub(crate) fn updates(&self, observer: &impl Observer) -> SourceUpdates<'_> {
        match self {
            Self::File(it) => {
                observer.source(FILE, SyncStatus::default());
                SourceUpdates::File(it)
            }
            Self::Api(it) => {
                let status = SyncStatus { address: Some(it.address.clone()), ..SyncStatus::default() };
                observer.source(API, status.clone());
                SourceUpdates::Api { updates: from_now(&it.updates), outage: from_now(&it.outage), status }
            }
            Self::Kube { source, .. } => {
                report(source, observer);
                SourceUpdates::Kube(source)
            }
        }
    }
}

/// Reports how the watches of an API server are doing, by resource, and what is rejected.
fn report(source: &KubeSource, observer: &impl Observer) {
    if let Some(rejected) = source.take_rejected() {
        observer.rejected(Stage::Source, &rejected);
    }
    for it in source.resources() {
        let last_contact = it.last_contact.map(|it| SystemTime::now() - it.elapsed());
        let address = Some(source.server().to_owned());
        let status = SyncStatus { address, is_synced: it.is_synced, last_contact, error: it.error };
        observer.source(it.resource, status);
    }
}

/// The receiver, for which the present value counts as changed.
fn from_now<T>(receiver: &watch::Receiver<T>) -> watch::Receiver<T> {
    let mut receiver = receiver.clone();
    receiver.mark_changed();
    receiver
}

impl SourceUpdates<'_> {
    /// Waits for the next update; `None` if the source has ended. Cancel-safe.
    pub(crate) async fn next(&mut self, observer: &impl Observer) -> Option<SourceUpdate> {
        loop {
            let update = match self {
                Self::File(source) => {
                    let FileUpdate { changes, report } = source.next().await?;
                    if let Some(report) = report {
                        let problems: Vec<_> = report.problems.iter().map(ToString::to_string).collect();
                        let error = Some(problems.join("; ")).filter(|it| !it.is_empty());
                        observer.source(FILE, SyncStatus { is_synced: true, error, ..SyncStatus::default() });
                        observer.rejected(Stage::Source, &report.rejected.into_iter().collect());
                    }
                    Some(SourceUpdate::Changes(changes))
                }
                Self::Api { updates, outage, status } => {
                    let update = tokio::select! {
                        changed = updates.changed() => {
                            changed.ok()?;
                            updates.borrow_and_update().clone()
                        }
                        changed = outage.changed() => {
                            changed.ok()?;
                            status.error.clone_from(&outage.borrow_and_update());
                            None
                        }
                    };
                    status.is_synced |= update.is_some();
                    if status.is_synced && status.error.is_none() {
                        status.last_contact = Some(SystemTime::now());
                    }
                    observer.source(API, status.clone());
                    update.map(SourceUpdate::Api)
                }
                Self::Kube(source) => {
                    let changes = tokio::select! {
                        changes = source.next() => Some(changes?),
                        () = sleep(STATUS_INTERVAL) => None,
                    };
                    report(source, observer);
                    changes.map(SourceUpdate::Changes)
                }
            };
            if update.is_some() {
                return update;
            }
        }
    }
}
