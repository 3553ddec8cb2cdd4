//! Notifications of changes to a path, by inotify.
//!
//! They are hints: a missed change is found by polling, so a system without notifications is slower, but not wrong.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    future::pending,
    io, mem,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use tokio::net::unix::pipe;

use super::folder;

/// What may have changed.
#[derive(Debug, Default)]
pub(super) struct Touched {
    pub(super) paths: BTreeSet<PathBuf>,
    /// The targets of symbolic links.
    pub(super) links: bool,
    pub(super) all: bool,
}

impl Touched {
    pub(super) fn is_empty(&self) -> bool {
        self.paths.is_empty() && !self.links && !self.all
    }
}

#[derive(Debug)]
pub(super) struct FolderWatch {
    path: PathBuf,
    notifications: Option<Notifications>,
    folders: Vec<WatchedFolder>,
    /// What has been touched and was not looked at yet.
    pub(super) touched: Touched,
    /// Whether there were notifications since the last [`renew`](Self::renew).
    is_notified: bool,
}

/// A folder, and its notifications unless it cannot be watched.
#[derive(Debug)]
struct WatchedFolder {
    path: PathBuf,
    /// Device and inode: a replaced folder has another one.
    identity: Option<(u64, u64)>,
    /// Changes when a file is created, renamed or deleted.
    modified: Option<(i64, i64)>,
    descriptor: Option<WatchDescriptor>,
}

/// A file is read when it has been written and closed, not while it is written.
const EVENTS: AddWatchFlags = AddWatchFlags::IN_CLOSE_WRITE.union(ENTRY_EVENTS).union(SELF_EVENTS);
const ENTRY_EVENTS: AddWatchFlags =
    AddWatchFlags::IN_CREATE.union(AddWatchFlags::IN_MOVE).union(AddWatchFlags::IN_DELETE);
const SELF_EVENTS: AddWatchFlags = AddWatchFlags::IN_DELETE_SELF.union(AddWatchFlags::IN_MOVE_SELF);

impl FolderWatch {
    /// Must be called within a tokio runtime.
    pub(super) fn new(path: &Path) -> Self {
        let notifications = Notifications::new()
            .inspect_err(
                |error| tracing::warn!(%error, "inotify is not available; the files are polled instead"),
            )
            .ok();
        let mut watch = Self {
            path: path.to_owned(),
            notifications,
            folders: Vec::new(),
            touched: Touched::default(),
            is_notified: false,
        };
        watch.renew();
        watch
    }

    /// Whether all folders are watched.
    pub(super) fn is_complete(&self) -> bool {
        self.folders.iter().all(|it| it.descriptor.is_some())
    }

    /// Waits for a change. Cancel-safe.
    pub(super) async fn changed(&mut self) {
        while self.touched.is_empty() {
            let Some(notifications) = &self.notifications else { return pending().await };
            let events = notifications.next().await;
            self.receive(events);
        }
    }

    /// Watches folders that have been created or replaced, and looks for changes in them that were not notified.
    pub(super) fn renew(&mut self) {
        self.drain();
        let is_notified = mem::take(&mut self.is_notified);
        let mut before = mem::take(&mut self.folders);
        for path in folders(&self.path) {
            let metadata = fs::metadata(&path).ok();
            let identity = metadata.as_ref().map(|it| (it.dev(), it.ino()));
            let modified = metadata.as_ref().map(|it| (it.mtime(), it.mtime_nsec()));
            let known = before.iter().position(|it| it.path == path && it.identity == identity);
            let mut folder = match known {
                Some(index) => before.swap_remove(index),
                None => WatchedFolder { path, identity, modified: None, descriptor: None },
            };
            self.touched.all |= known.is_none() || (folder.modified != modified && !is_notified);
            folder.modified = modified;
            if folder.descriptor.is_none()
                && let Some(notifications) = &self.notifications
            {
                let flags = EVENTS | AddWatchFlags::IN_ONLYDIR;
                let added = notifications.inotify.add_watch(&folder.path, flags).inspect_err(|error| {
                    tracing::debug!(folder = %folder.path.display(), %error, "the folder cannot be watched; it is polled instead");
                });
                folder.descriptor = added.ok();
            }
            self.folders.push(folder);
        }
        for descriptor in before.into_iter().filter_map(|it| it.descriptor) {
            // It has ended if its folder was deleted.
            let is_in_use = self.folders.iter().any(|it| it.descriptor == Some(descriptor));
            if let Some(notifications) = self.notifications.as_ref().filter(|_| !is_in_use) {
                let _ = notifications.inotify.rm_watch(descriptor);
            }
        }
    }

    fn drain(&mut self) {
        while let Some(Ok(events)) = self.notifications.as_ref().map(|it| it.inotify.read_events()) {
            self.receive(events);
        }
    }

    fn receive(&mut self, events: Vec<InotifyEvent>) {
        self.is_notified |= !events.is_empty();
        events.into_iter().for_each(|it| self.record(it));
    }

    fn record(&mut self, InotifyEvent { wd, mask, name, .. }: InotifyEvent) {
        let Some(index) = self.folders.iter().position(|it| it.descriptor == Some(wd)) else {
            self.touched.all |= mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
            return;
        };
        if mask.intersects(SELF_EVENTS | AddWatchFlags::IN_IGNORED) {
            self.folders[index].identity = None;
            self.touched.all = true;
        } else if let Some(path) = name.as_deref().filter(|_| index == 0).and_then(|it| self.manifest(it)) {
            self.touched.paths.insert(path);
        } else if index > 0 || mask.intersects(ENTRY_EVENTS) {
            self.touched.links = true;
        }
    }

    /// The path of a manifest by its name in the first folder; `None` if it is another file.
    fn manifest(&self, name: &OsStr) -> Option<PathBuf> {
        let folder = &self.folders.first()?.path;
        match *folder == self.path {
            true => folder::is_manifest(name).then(|| folder.join(name)),
            false => (self.path.file_name() == Some(name)).then(|| self.path.clone()),
        }
    }
}

/// The folder, or that of the file; and if it is a symbolic link, the folder of its target.
fn folders(path: &Path) -> Vec<PathBuf> {
    let folder = |path: &Path| if path.is_dir() { path.to_owned() } else { folder::parent(path).to_owned() };
    let mut folders = vec![folder(path)];
    if let Ok(target) = path.canonicalize()
        && let Ok(first) = folders[0].canonicalize()
        && folder(&target) != first
    {
        folders.push(folder(&target));
    }
    folders
}

#[derive(Debug)]
struct Notifications {
    inotify: Inotify,
    /// The descriptor of `inotify`, as the runtime waits for it: it can wait for any descriptor that can be polled.
    readiness: pipe::Receiver,
}

impl Notifications {
    fn new() -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        let readiness = pipe::Receiver::from_owned_fd_unchecked(inotify.as_fd().try_clone_to_owned()?)?;
        Ok(Self { inotify, readiness })
    }

    /// Waits for events; perhaps there are none. Cancel-safe.
    async fn next(&self) -> Vec<InotifyEvent> {
        if self.readiness.readable().await.is_err() {
            // The runtime ends.
            return pending().await;
        }
        self.readiness.try_io(|| Ok(self.inotify.read_events()?)).unwrap_or_default()
    }
}
