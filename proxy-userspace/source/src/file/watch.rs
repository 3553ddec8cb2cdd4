//! Notifications of changes to a path, by inotify.
//!
//! They are hints: a missed change is found by polling, so a system without notifications is slower, but not wrong.

use std::{
    collections::BTreeSet,
    fs, mem,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use notify::{
    Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher,
    event::{AccessKind, AccessMode},
};
use tokio::sync::Notify;

use super::folder;

/// Watches the folders of the manifests.
#[derive(Debug)]
pub(super) struct FolderWatch {
    folders: Vec<(PathBuf, Option<Identity>)>,
    watcher: Option<RecommendedWatcher>,
    shared: Arc<Shared>,
}

/// Device and inode: a replaced folder has another one.
type Identity = (u64, u64);

#[derive(Debug, Default)]
struct Shared {
    touched: Mutex<BTreeSet<PathBuf>>,
    changed: Notify,
}

impl FolderWatch {
    pub(super) fn new(path: &Path) -> Self {
        let shared = Arc::new(Shared::default());
        let receiver = Arc::clone(&shared);
        let watcher = notify::recommended_watcher(move |event| receiver.receive(event));
        let watcher = watcher
            .inspect_err(
                |error| tracing::warn!(%error, "inotify is not available; polling every second instead"),
            )
            .ok();
        let mut watch = Self { folders: folders(path), watcher, shared };
        watch.renew();
        watch
    }

    /// Waits for a change.
    pub(super) async fn changed(&self) {
        self.shared.changed.notified().await;
    }

    /// The paths that have been touched since the last call.
    pub(super) fn take_touched(&mut self) -> BTreeSet<PathBuf> {
        mem::take(&mut self.shared.touched.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Watches folders that have been created or replaced.
    pub(super) fn renew(&mut self) {
        let Some(watcher) = &mut self.watcher else { return };
        for (folder, watched) in &mut self.folders {
            let identity = fs::metadata(&*folder).ok().map(|it| (it.dev(), it.ino()));
            if identity == *watched {
                continue;
            }
            // The old watch may have ended with its folder.
            let _ = watcher.unwatch(folder);
            *watched = identity.filter(|_| match watcher.watch(folder, RecursiveMode::NonRecursive) {
                Ok(()) => true,
                Err(error) => {
                    let folder = folder.display();
                    tracing::debug!(%folder, %error, "the folder cannot be watched; polling every second instead");
                    false
                }
            });
        }
    }
}

impl Shared {
    fn receive(&self, event: notify::Result<Event>) {
        let paths = match event {
            Ok(Event { kind: EventKind::Access(kind), paths, .. }) => {
                // Our own reads are such events too.
                if kind != AccessKind::Close(AccessMode::Write) {
                    return;
                }
                paths
            }
            Ok(event) => event.paths,
            Err(_) => Vec::new(),
        };
        self.touched.lock().unwrap_or_else(PoisonError::into_inner).extend(paths);
        self.changed.notify_one();
    }
}

/// The folder, or that of the file; and if it is a symbolic link, the folder of its target.
fn folders(path: &Path) -> Vec<(PathBuf, Option<Identity>)> {
    let folder = |path: &Path| if path.is_dir() { path.to_owned() } else { folder::parent(path).to_owned() };
    let mut folders = vec![folder(path)];
    if let Ok(target) = path.canonicalize()
        && let Ok(first) = folders[0].canonicalize()
        && folder(&target) != first
    {
        folders.push(folder(&target));
    }
    folders.into_iter().map(|it| (it, None)).collect()
}
