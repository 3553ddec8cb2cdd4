//! The source `file:PATH`: a manifest or a folder of manifests, watched for changes.
//!
//! Invariant: the last valid content of a file stays active while the file is invalid, incomplete or being replaced.
//! A file that is written in place cannot be told from an edit if it is valid up to where it ends: write to another name
//! and rename, which is atomic.

mod documents;
mod folder;
mod merge;
mod parse;
mod store;
mod watch;

use std::{
    collections::BTreeSet,
    future::pending,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use model::cluster::ClusterState;
use tokio::{
    sync::watch as channel,
    task::{JoinSet, spawn_blocking},
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until},
};

pub use documents::Position;
pub use parse::{ManifestFormat, Object, ParseError, ParsedManifest, parse};

use self::{store::FileStore, watch::FolderWatch};
use crate::snapshot::{Snapshot, Snapshots};

/// How long to wait after a change for further changes that belong to it.
const DEBOUNCE: Duration = Duration::from_millis(3);
/// How often the files are checked without a notification: some file systems send none.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Why a file source cannot be started.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}: {error}; give a readable manifest or a folder of manifests", path.display())]
pub struct FileError {
    /// The given path.
    pub path: PathBuf,
    /// The system's error.
    pub error: io::Error,
}

/// A running file source; it stops when it is dropped.
#[derive(Debug)]
pub struct FileSource {
    snapshots: Snapshots,
    _task: JoinSet<()>,
}

impl FileSource {
    /// Reads `path` and follows it from then on.
    ///
    /// On return there is a first snapshot, unless there are files and none of them can be parsed.
    /// Must be called within a tokio runtime.
    pub fn start(path: impl Into<PathBuf>) -> Result<Self, FileError> {
        let path = path.into();
        check(&path)?;
        // The watch is set up before the first read, so that no change is missed between them.
        let watch = FolderWatch::new(&path);
        let mut reader = Reader { store: FileStore::new(path), reported: BTreeSet::new() };
        let (sender, snapshots) = channel::channel(None);
        reader.refresh(&BTreeSet::new(), &sender);
        let _task = JoinSet::from_iter([follow(reader, watch, sender)]);
        Ok(Self { snapshots, _task })
    }

    /// Receives the snapshots.
    pub fn snapshots(&self) -> Snapshots {
        self.snapshots.clone()
    }
}

/// Reads `path` once; parse errors are among the snapshot's problems.
pub fn read(path: &Path) -> Result<Snapshot, FileError> {
    check(path)?;
    let mut store = FileStore::new(path.to_owned());
    store.refresh(&BTreeSet::new(), Instant::now());
    Ok(store
        .snapshot(&ClusterState::default())
        .unwrap_or_else(|| Snapshot { problems: store.problems().collect(), ..Snapshot::default() }))
}

fn check(path: &Path) -> Result<(), FileError> {
    folder::list(path).map(drop).map_err(|error| FileError { path: path.to_owned(), error })
}

async fn follow(mut reader: Reader, mut watch: FolderWatch, sender: channel::Sender<Option<Arc<Snapshot>>>) {
    let mut poll = interval(POLL_INTERVAL);
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let deadline = reader.store.next_deadline();
        let grace_elapsed = async {
            match deadline {
                Some(deadline) => sleep_until(deadline).await,
                None => pending().await,
            }
        };
        tokio::select! {
            () = watch.changed() => sleep(DEBOUNCE).await,
            () = grace_elapsed => {}
            _ = poll.tick() => watch.renew(),
        }
        let touched = watch.take_touched();
        let sender = sender.clone();
        let reading = spawn_blocking(move || {
            reader.refresh(&touched, &sender);
            reader
        });
        reader = match reading.await {
            Ok(reader) => reader,
            Err(error) => {
                tracing::error!(%error, "the file source has stopped");
                return;
            }
        };
    }
}

/// Reads the files, and logs what is new among the problems.
#[derive(Debug)]
struct Reader {
    store: FileStore,
    /// The logged problems that still exist.
    reported: BTreeSet<String>,
}

impl Reader {
    fn refresh(&mut self, touched: &BTreeSet<PathBuf>, sender: &channel::Sender<Option<Arc<Snapshot>>>) {
        let has_changed = self.store.refresh(touched, Instant::now());
        let previous = sender.borrow().clone();
        if !has_changed && previous.is_some() {
            return;
        }
        let cluster = previous.as_ref().map(|it| Arc::clone(&it.cluster)).unwrap_or_default();
        let Some(snapshot) = self.store.snapshot(&cluster) else {
            self.report(self.store.problems().collect());
            return;
        };
        let rejected = snapshot.rejected.iter().map(|it| format!("not served: {it}"));
        self.report(snapshot.problems.iter().cloned().chain(rejected).collect());
        if previous.is_none_or(|previous| *previous != snapshot) {
            sender.send_replace(Some(Arc::new(snapshot)));
        }
    }

    fn report(&mut self, problems: BTreeSet<String>) {
        for problem in problems.difference(&self.reported) {
            tracing::warn!("{problem}");
        }
        if problems.is_empty() && !self.reported.is_empty() {
            tracing::info!("all files and objects are valid again");
        }
        self.reported = problems;
    }
}

#[cfg(test)]
mod tests;
