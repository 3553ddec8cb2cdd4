//! What any source says, in one form.
//!
//! The one rule: always the newest; what was overtaken is never heard of.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use admin::{Admin, Stage};
use model::{cluster::ClusterState, state::NodeState};
use source::{
    Changes, Snapshots,
    api::{ApiSource, Said},
    file::FileSource,
    kube::KubeSource,
};
use tokio::{sync::watch, time::sleep};

/// How often to look how following an API server goes.
const LOOK: Duration = Duration::from_secs(1);

/// What the sources are called in reports; of an API server it is the kinds.
const FILE: &str = "file";
const API: &str = "api";

/// What a source says that is new.
pub(super) enum News {
    /// All facts, as they are now.
    Facts(Arc<ClusterState>),
    /// What has changed since the last news; at first, all there is.
    Changes(Changes),
    /// The node's state is decided elsewhere.
    State(NodeState),
}

/// A source at work.
pub(super) enum Running {
    /// Manifests.
    File(FileSource),
    /// Another brain.
    Api(ApiSource),
    /// An API server.
    Kube(KubeSource),
}

/// What a source says, as it comes.
pub(super) enum NewsOf<'a> {
    File(Snapshots),
    Api(watch::Receiver<Option<Said>>),
    Kube(&'a KubeSource),
}

impl Running {
    /// Listens to the source, and tells `admin` that there is one. What it has said already is new as well.
    pub(super) fn news(&self, admin: Option<&Admin>) -> NewsOf<'_> {
        let (name, news) = match self {
            Self::File(it) => (FILE, NewsOf::File(first(it.snapshots()))),
            Self::Api(it) => (API, NewsOf::Api(first(it.said()))),
            Self::Kube(it) => {
                tell(it, admin);
                return NewsOf::Kube(it);
            }
        };
        if let Some(admin) = admin {
            admin.source(name, admin::Source::default());
        }
        news
    }
}

/// Tells how following an API server goes, kind by kind.
fn tell(source: &KubeSource, admin: Option<&Admin>) {
    let Some(admin) = admin else { return };
    for it in source.health().kinds() {
        let last_contact = it.last_contact.map(|it| SystemTime::now() - it.elapsed());
        admin.source(it.kind, admin::Source { synced: it.is_synced, error: it.error, last_contact });
    }
}

fn first<T>(mut receiver: watch::Receiver<T>) -> watch::Receiver<T> {
    receiver.mark_changed();
    receiver
}

impl NewsOf<'_> {
    /// None if the source has ended. Nothing is lost if it is dropped while it waits. How the source stands is told to
    /// `admin`.
    pub(super) async fn next(&mut self, admin: Option<&Admin>) -> Option<News> {
        loop {
            let news = match self {
                Self::File(snapshots) => {
                    snapshots.changed().await.ok()?;
                    let snapshot = snapshots.borrow_and_update();
                    if let (Some(admin), Some(snapshot)) = (admin, &*snapshot) {
                        let error = Some(snapshot.problems.join("; ")).filter(|it| !it.is_empty());
                        admin.source(FILE, admin::Source { synced: true, error, last_contact: None });
                        admin.rejected(Stage::Source, snapshot.rejected.iter().cloned());
                    }
                    snapshot.as_ref().map(|it| News::Facts(Arc::clone(&it.facts)))
                }
                Self::Api(said) => {
                    said.changed().await.ok()?;
                    let said = said.borrow_and_update();
                    if let (Some(admin), Some(_)) = (admin, &*said) {
                        let last_contact = Some(SystemTime::now());
                        admin.source(API, admin::Source { synced: true, error: None, last_contact });
                    }
                    said.clone().map(|it| match it {
                        Said::Facts(facts) => News::Facts(facts),
                        Said::State(state) => News::State(state),
                    })
                }
                Self::Kube(source) => {
                    let changes = tokio::select! {
                        changes = source.next() => Some(changes?),
                        () = sleep(LOOK) => None,
                    };
                    tell(source, admin);
                    changes.map(News::Changes)
                }
            };
            if news.is_some() {
                return news;
            }
        }
    }
}
