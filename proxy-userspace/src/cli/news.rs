//! What any source says, in one form.
//!
//! The one rule: always the newest; what was overtaken is never heard of.

use std::sync::Arc;

use model::{facts::Facts, state::NodeState};
use source::{
    Changes, Snapshots,
    api::{ApiSource, Said},
    file::FileSource,
    kube::KubeSource,
};
use tokio::sync::watch;

/// What a source says that is new.
pub(super) enum News {
    /// All facts, as they are now.
    Facts(Arc<Facts>),
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
    /// Listens to the source. What it has said already is new as well.
    pub(super) fn news(&self) -> NewsOf<'_> {
        match self {
            Self::File(it) => NewsOf::File(first(it.snapshots())),
            Self::Api(it) => NewsOf::Api(first(it.said())),
            Self::Kube(it) => NewsOf::Kube(it),
        }
    }
}

fn first<T>(mut receiver: watch::Receiver<T>) -> watch::Receiver<T> {
    receiver.mark_changed();
    receiver
}

impl NewsOf<'_> {
    /// None if the source has ended. Nothing is lost if it is dropped while it waits.
    pub(super) async fn next(&mut self) -> Option<News> {
        loop {
            let news = match self {
                Self::File(snapshots) => {
                    snapshots.changed().await.ok()?;
                    let snapshot = snapshots.borrow_and_update();
                    snapshot.as_ref().map(|it| News::Facts(Arc::clone(&it.facts)))
                }
                Self::Api(said) => {
                    said.changed().await.ok()?;
                    let said = said.borrow_and_update();
                    said.clone().map(|it| match it {
                        Said::Facts(facts) => News::Facts(facts),
                        Said::State(state) => News::State(state),
                    })
                }
                Self::Kube(source) => Some(News::Changes(source.next().await?)),
            };
            if news.is_some() {
                return news;
            }
        }
    }
}
