//! The cgroups of the pods whose annotation says how their sockets are served.
//!
//! A pod may be known before its cgroup exists, or after. Folders are watched before they are read, so that every cgroup that is
//! created is either found or notified.

use std::{
    collections::BTreeMap,
    fs,
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use model::state::{Pod, Pods, SocketLb};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use proxy_common::exclusion::MAX_EXCLUDED_PODS;
use tokio::net::unix::pipe::Receiver;

use crate::host::{cgroup::folders_in, cgroup_paths::pod_uid};

/// The pods, and their cgroups below one.
pub(crate) struct PodCgroups {
    root: PathBuf,
    /// `None` if the system has none to spare.
    inotify: Option<Inotify>,
    pods: Pods,
    /// The cgroups that were found, by the UIDs of their pods.
    found: BTreeMap<String, Found>,
    /// Whether it was logged that there are too many.
    is_full: bool,
}

struct Found {
    pod: Arc<Pod>,
    id: u64,
    /// Whether it was logged that it is in effect.
    is_logged: bool,
}

impl PodCgroups {
    /// How deep below `root` there may be cgroups of pods: kubelet's own one, which kind and `--cgroup-root` put below another,
    /// the class of service, and the pod.
    pub(crate) const MAX_DEPTH: usize = 4;

    /// No pods, whose cgroups are below `root`.
    pub(crate) fn new(root: &Path) -> Self {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).inspect_err(|error| {
            tracing::warn!(%error, "inotify is not available; new cgroups of pods are found within seconds only");
        });
        let inotify = inotify.ok();
        Self { root: root.to_owned(), inotify, pods: Pods::default(), found: BTreeMap::new(), is_full: false }
    }

    /// Replaces the pods; returns whether they have changed.
    pub(crate) fn set(&mut self, pods: &Pods) -> bool {
        let has_changed = self.pods != *pods;
        self.pods.clone_from(pods);
        has_changed
    }

    /// Finds the cgroups that exist now: their ids, and how the sockets of their pods are served.
    pub(crate) fn refresh(&mut self) -> impl Iterator<Item = (u64, SocketLb)> {
        let mut folders = BTreeMap::new();
        self.search(&self.root, 0, false, &mut folders);
        let mut before = std::mem::take(&mut self.found);
        for pod in self.pods.values() {
            let known = before.remove(&*pod.uid);
            let Some(path) = folders.remove(&*pod.uid) else { continue };
            let Ok(id) = fs::metadata(&path).map(|it| it.ino()) else { continue };
            if self.found.len() == MAX_EXCLUDED_PODS as usize {
                if !std::mem::replace(&mut self.is_full, true) {
                    tracing::error!(
                        pod = %pod.name, limit = MAX_EXCLUDED_PODS,
                        "too many pods have the annotation kube-proxy-ebpf.io/socket-lb; sockets of this one and others \
                         are redirected"
                    );
                }
                break;
            }
            let is_logged =
                known.is_some_and(|it| it.is_logged && it.id == id && it.pod.socket_lb == pod.socket_lb);
            self.found.insert(pod.uid.to_string(), Found { pod: Arc::clone(pod), id, is_logged });
        }
        self.found.values().map(|it| (it.id, it.pod.socket_lb))
    }

    /// Logs which pods are new, once the programs know what [`refresh`](Self::refresh) has found.
    pub(crate) fn log_new(&mut self) {
        for it in self.found.values_mut().filter(|it| !it.is_logged) {
            it.is_logged = true;
            let sockets = match it.pod.socket_lb {
                SocketLb::Off => "all",
                SocketLb::TcpOnly => "UDP",
            };
            tracing::info!(pod = %it.pod.name, sockets, "sockets left to packets");
        }
    }

    /// The names of the pods that have a cgroup here.
    pub(crate) fn names(&self) -> String {
        self.found.values().map(|it| it.pod.name.to_string()).collect::<Vec<_>>().join(", ")
    }

    /// Watches a folder, and collects the cgroups of pods below it by UID.
    ///
    /// Whatever is not kubelet's is entered once, since kubelet's cgroup may be below it.
    fn search(&self, folder: &Path, depth: usize, is_kubelets: bool, pods: &mut BTreeMap<String, PathBuf>) {
        if let Some(inotify) = &self.inotify {
            // A folder that is watched already stays watched once.
            let _ = inotify.add_watch(folder, AddWatchFlags::IN_CREATE | AddWatchFlags::IN_ONLYDIR);
        }
        for path in folders_in(folder) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if let Some(uid) = pod_uid(&name) {
                pods.insert(uid, path);
                continue;
            }
            let is_kubelets = is_kubelets || name.contains("kube");
            if depth + 1 < Self::MAX_DEPTH && (is_kubelets || depth == 0) {
                self.search(&path, depth + 1, is_kubelets, pods);
            }
        }
    }

    /// Notifications of cgroups that were created where pods' are. Must be called within a tokio runtime.
    pub(crate) fn events(&self) -> Option<CgroupEvents> {
        let fd = self.inotify.as_ref()?.as_fd().try_clone_to_owned();
        // The runtime can wait for any descriptor that can be polled.
        let events = fd.and_then(Receiver::from_owned_fd_unchecked).map(CgroupEvents);
        events.inspect_err(|error| tracing::warn!(%error, "new cgroups are not notified")).ok()
    }
}

/// Notifications of cgroups that were created.
#[derive(Debug)]
pub struct CgroupEvents(Receiver);

impl CgroupEvents {
    /// Waits until a cgroup was created. Cancel-safe.
    pub async fn next(&mut self) {
        if self.0.readable().await.is_err() {
            // The runtime ends.
            return std::future::pending().await;
        }
        // What was created is searched for, whatever the notifications say.
        let mut buffer = [0; 4096];
        while self.0.try_read(&mut buffer).is_ok_and(|it| it > 0) {}
    }
}
