//! The source `file:PATH`: a manifest, or a folder of them, that is watched.
//!
//! The one rule: the last good state is kept.
//! What is broken, half-written or just being replaced changes nothing.
//! The one thing that cannot be told from an edit is a half-written file that is valid up to where it ends:
//! write to another name and rename, which is atomic.

mod documents;
mod folder;
mod merge;
mod parse;
mod store;
mod watch;

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use model::cluster::ClusterState;
use tokio::{sync::watch as channel, task::JoinHandle, time::Instant};

pub use parse::{ManifestFormat, Object, ParseError, ParsedManifest, Position, parse};

use self::{store::Store, watch::Watch};
use crate::{Snapshot, Snapshots};

/// How long to wait after a change for those that belong to it.
const DEBOUNCE: Duration = Duration::from_millis(3);
/// How often to look without having been told of a change: some file systems tell nothing.
const POLL: Duration = Duration::from_secs(1);

/// Why a file source could not be started.
#[derive(Debug, thiserror::Error)]
#[error("{} cannot be read; name a manifest or a folder of manifests that can", path.display())]
pub struct FileError {
    /// The path that was given.
    pub path: PathBuf,
    /// What the system said about it.
    #[source]
    pub error: io::Error,
}

/// A running file source; it ends when it is dropped.
#[derive(Debug)]
pub struct FileSource {
    snapshots: Snapshots,
    task: JoinHandle<()>,
}

impl FileSource {
    /// Reads `path`, and from then on follows it.
    ///
    /// The first snapshot is there on return, unless there are files and none of them can be parsed.
    /// Must be called within a tokio runtime.
    pub fn start(path: impl Into<PathBuf>) -> Result<Self, FileError> {
        let path = path.into();
        check(&path)?;
        // Watched before it is read, so that no change falls between the two.
        let watch = Watch::new(&path);
        let mut follower = Follower::new(path);
        let (sender, snapshots) = channel::channel(None);
        follower.refresh(&BTreeSet::new(), &sender);
        let task = tokio::spawn(follow(follower, watch, sender));
        Ok(Self { snapshots, task })
    }

    /// Where its snapshots arrive.
    pub fn snapshots(&self) -> Snapshots {
        self.snapshots.clone()
    }
}

impl Drop for FileSource {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Reads `path` once; what does not parse is among the problems.
pub fn read(path: &Path) -> Result<Snapshot, FileError> {
    check(path)?;
    let mut store = Store::new(path.to_owned());
    store.refresh(&BTreeSet::new(), Instant::now());
    Ok(store
        .snapshot(&ClusterState::default())
        .unwrap_or_else(|| Snapshot { problems: store.problems().collect(), ..Snapshot::default() }))
}

fn check(path: &Path) -> Result<(), FileError> {
    std::fs::metadata(path)
        .and_then(|_| folder::list(path))
        .map(drop)
        .map_err(|error| FileError { path: path.to_owned(), error })
}

async fn follow(mut follower: Follower, mut watch: Watch, sender: channel::Sender<Option<Arc<Snapshot>>>) {
    let mut poll = tokio::time::interval(POLL);
    poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let next_look = follower.store.next_look();
        tokio::select! {
            () = watch.changed() => tokio::time::sleep(DEBOUNCE).await,
            () = sleep_until(next_look) => {}
            _ = poll.tick() => watch.renew(),
        }
        let touched = watch.take();
        let sender = sender.clone();
        let reading = tokio::task::spawn_blocking(move || {
            follower.refresh(&touched, &sender);
            follower
        });
        follower = match reading.await {
            Ok(follower) => follower,
            Err(error) => {
                tracing::error!(%error, "the file source has ended");
                return;
            }
        };
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// The store, and what was said of it before.
#[derive(Debug)]
struct Follower {
    store: Store,
    /// What has been complained about and still holds.
    said: BTreeSet<String>,
}

impl Follower {
    fn new(path: PathBuf) -> Self {
        Self { store: Store::new(path), said: BTreeSet::new() }
    }

    fn refresh(&mut self, touched: &BTreeSet<PathBuf>, sender: &channel::Sender<Option<Arc<Snapshot>>>) {
        let changed = self.store.refresh(touched, Instant::now());
        let before = sender.borrow().clone();
        if !changed && before.is_some() {
            return;
        }
        let facts = before.as_ref().map(|it| Arc::clone(&it.facts)).unwrap_or_default();
        let Some(now) = self.store.snapshot(&facts) else {
            self.say(self.store.problems().collect());
            return;
        };
        self.say(now.problems.iter().cloned().chain(now.rejected.iter().map(ToString::to_string)).collect());
        if before.is_none_or(|before| *before != now) {
            sender.send_replace(Some(Arc::new(now)));
        }
    }

    /// Complains about what is new.
    fn say(&mut self, problems: BTreeSet<String>) {
        for problem in problems.difference(&self.said) {
            tracing::warn!("{problem}");
        }
        self.said = problems;
    }
}

#[cfg(test)]
mod tests;
