//! Being told of changes to a path.
//!
//! The one rule: it is a hint.
//! What is missed is found by the slow poll, so that a system without it is slower and nothing else.

use std::{
    collections::BTreeSet,
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

/// Watches the folder that holds the manifests.
#[derive(Debug)]
pub(super) struct Watch {
    folders: Vec<(PathBuf, Option<Identity>)>,
    watcher: Option<RecommendedWatcher>,
    shared: Arc<Shared>,
}

/// Device and inode: a folder that is replaced has another.
type Identity = (u64, u64);

#[derive(Debug, Default)]
struct Shared {
    touched: Mutex<BTreeSet<PathBuf>>,
    changed: Notify,
}

impl Watch {
    pub(super) fn new(path: &Path) -> Self {
        let shared = Arc::new(Shared::default());
        let told = Arc::clone(&shared);
        let watcher = notify::recommended_watcher(move |event| told.hear(event));
        let watcher = watcher
            .inspect_err(|error| tracing::warn!(%error, "no notice of changes; looking every second instead"))
            .ok();
        let mut watch = Self { folders: folders(path), watcher, shared };
        watch.renew();
        watch
    }

    /// Waits for a change.
    pub(super) async fn changed(&self) {
        self.shared.changed.notified().await;
    }

    /// What has been touched since the last call.
    pub(super) fn take(&mut self) -> BTreeSet<PathBuf> {
        std::mem::take(&mut self.shared.touched.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Watches folders that are there again, or that others have taken the place of.
    pub(super) fn renew(&mut self) {
        let Some(watcher) = &mut self.watcher else { return };
        for (folder, watched) in &mut self.folders {
            let identity = std::fs::metadata(&*folder).ok().map(|it| (it.dev(), it.ino()));
            if identity == *watched {
                continue;
            }
            // The old watch may have ended with its folder.
            let _ = watcher.unwatch(folder);
            *watched = identity.filter(|_| match watcher.watch(folder, RecursiveMode::NonRecursive) {
                Ok(()) => true,
                Err(error) => {
                    tracing::debug!(folder = %folder.display(), %error, "looking every second instead");
                    false
                }
            });
        }
    }
}

impl Shared {
    fn hear(&self, event: notify::Result<Event>) {
        let paths = match event {
            Ok(Event { kind: EventKind::Access(kind), paths, .. }) => {
                // Our own reading is an event, too.
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

/// The folder itself, or the one a file lies in; and the one that a symbolic link leads to.
fn folders(path: &Path) -> Vec<(PathBuf, Option<Identity>)> {
    let folder = |path: &Path| if path.is_dir() { path.to_owned() } else { folder::parent(path).to_owned() };
    let mut folders = vec![folder(path)];
    if let Ok(real) = path.canonicalize()
        && let Ok(first) = folders[0].canonicalize()
        && folder(&real) != first
    {
        folders.push(folder(&real));
    }
    folders.into_iter().map(|it| (it, None)).collect()
}
