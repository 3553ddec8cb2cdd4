//! The source `file:PATH`: a manifest or a folder of manifests, watched for changes.
//!
//! Invariant: the last valid content of a file stays active while the file is invalid, incomplete or being replaced.
//! A file that is written in place cannot be told from an edit if it is valid up to where it ends: write to another name
//! and rename, which is atomic.
//! A change costs the size of the changed file, whatever the number of files: a notification names the file.

mod documents;
mod folder;
mod objects;
mod parse;
mod store;
mod watch;

use std::{
    future::pending,
    io, mem,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;

use model::{Rejections, RequestedMetadata, cluster::ClusterChanges};
use tokio::{
    sync::{Mutex as AsyncMutex, Notify},
    task::{JoinSet, spawn_blocking},
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until},
};

pub use documents::{ParseError, Position};
pub use parse::{ParsedManifest, parse};
pub use store::FileReport;

use self::{
    store::FileStore,
    watch::{FolderWatch, Touched},
};
use crate::RejectionLog;

/// How long to wait after a change for further changes that belong to it.
const DEBOUNCE: Duration = Duration::from_millis(3);
/// How often the folder is checked without a notification: some file systems send none.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The interval between checks of all files, per file: notifications miss what changes elsewhere, such as the target of a
/// symbolic link. A check takes some microseconds, so that this is no load.
const FILE_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// The interval between checks of all files, per file, where there are no notifications.
const UNWATCHED_FILE_POLL_INTERVAL: Duration = Duration::from_micros(200);

#[derive(Debug, thiserror::Error)]
#[error("cannot read {}: {error}; give a readable manifest or a folder of manifests", path.display())]
pub struct FileError {
    pub path: PathBuf,
    pub error: io::Error,
}

#[derive(Debug, Default)]
pub struct FileUpdate {
    /// The changes of the objects since the last update; those of the first one are the whole cluster state.
    pub changes: ClusterChanges,
    /// What is wrong with the files now; `None` if that has not changed since the last update.
    pub report: Option<FileReport>,
}

/// A running file source; it stops when it is dropped.
#[derive(Debug)]
pub struct FileSource {
    shared: Arc<Shared>,
    /// It runs forever.
    task: AsyncMutex<JoinSet<()>>,
}

impl FileSource {
    /// Reads `path` and follows it from then on, with the requested labels and annotations of Services.
    ///
    /// On return there is a first update, unless there are files and none of them can be parsed.
    /// Must be called within a tokio runtime.
    pub fn start(path: impl Into<PathBuf>, requested: RequestedMetadata) -> Result<Self, FileError> {
        let path = path.into();
        check(&path)?;
        // The watch is set up before the first read, so that no change is missed between them.
        let watch = FolderWatch::new(&path);
        let shared = Arc::new(Shared::default());
        let mut reader = Reader::new(FileStore::new(path, requested), Arc::clone(&shared));
        reader.refresh(&Touched { all: true, ..Touched::default() });
        let task = AsyncMutex::new(JoinSet::from_iter([follow(reader, watch)]));
        Ok(Self { shared, task })
    }

    /// Waits for an update; `None` if the source has failed. Cancel-safe.
    pub async fn next(&self) -> Option<FileUpdate> {
        tokio::select! {
            update = self.shared.next() => Some(update),
            _ = async { self.task.lock().await.join_next().await } => None,
        }
    }
}

/// Reads `path` once, with the requested labels and annotations of Services; parse errors are among the problems.
pub fn read(path: &Path, requested: RequestedMetadata) -> Result<FileUpdate, FileError> {
    check(path)?;
    let mut store = FileStore::new(path.to_owned(), requested);
    store.refresh(&Touched { all: true, ..Touched::default() }, Instant::now());
    Ok(FileUpdate { report: Some(store.report()), changes: store.changes })
}

fn check(path: &Path) -> Result<(), FileError> {
    folder::list(path).map(drop).map_err(|error| FileError { path: path.to_owned(), error })
}

async fn follow(mut reader: Reader, mut watch: FolderWatch) {
    let mut poll = interval(POLL_INTERVAL);
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last_sweep = Instant::now();
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
            _ = poll.tick() => {}
        }
        watch.renew();
        let mut touched = mem::take(&mut watch.touched);
        let now = Instant::now();
        let per_file = if watch.is_complete() { FILE_POLL_INTERVAL } else { UNWATCHED_FILE_POLL_INTERVAL };
        let files = u32::try_from(reader.store.files.len()).unwrap_or(u32::MAX);
        touched.all |= now >= last_sweep + per_file.saturating_mul(files).max(POLL_INTERVAL);
        if touched.is_empty() && deadline.is_none_or(|it| now < it) {
            reader.log.remind();
            continue;
        }
        if touched.all {
            last_sweep = now;
        }
        let reading = spawn_blocking(move || {
            reader.refresh(&touched);
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

/// What the reader of the files and the reader of the updates share.
#[derive(Debug, Default)]
struct Shared {
    /// What the reader of the updates has not taken yet.
    update: Mutex<Option<FileUpdate>>,
    changed: Notify,
}

impl Shared {
    async fn next(&self) -> FileUpdate {
        loop {
            let changed = self.changed.notified();
            if let Some(update) = self.update.lock().take() {
                return update;
            }
            changed.await;
        }
    }
}

/// Reads the files, hands over what has changed, and logs what is new among the problems.
#[derive(Debug)]
struct Reader {
    store: FileStore,
    /// What is wrong with the files; `None` before there is a state.
    report: Option<FileReport>,
    log: RejectionLog,
    shared: Arc<Shared>,
}

impl Reader {
    fn new(store: FileStore, shared: Arc<Shared>) -> Self {
        Self { store, report: None, log: RejectionLog::default(), shared }
    }

    fn refresh(&mut self, touched: &Touched) {
        let begin = Instant::now();
        self.store.refresh(touched, begin);
        tracing::trace!(files = self.store.files.len(), took = ?begin.elapsed(), "checked the manifests");
        let report = self.store.report();
        if self.report.as_ref() != Some(&report) {
            self.log(&report);
        }
        // Before there is a state, nothing is handed over.
        if self.report.is_none() && !self.store.is_ready() {
            return;
        }
        let changes = mem::take(&mut self.store.changes);
        let report = (self.report.as_ref() != Some(&report)).then_some(report);
        if changes.is_empty() && report.is_none() {
            return;
        }
        if let Some(report) = &report {
            self.report = Some(report.clone());
        }
        let mut update = self.shared.update.lock();
        let update = update.get_or_insert_default();
        update.changes.extend(changes);
        update.report = report.or(mem::take(&mut update.report));
        self.shared.changed.notify_one();
    }

    fn log(&mut self, report: &FileReport) {
        let all: Rejections = report.problems.iter().chain(&report.rejected).cloned().collect();
        if self.log.update(&all) && all.is_empty() {
            tracing::info!("all files and objects are valid again");
        }
    }
}

#[cfg(test)]
mod tests;
