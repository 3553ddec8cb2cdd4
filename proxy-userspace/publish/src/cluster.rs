//! Publishes the cluster state to the server's watchers, which are other brains.
//!
//! Invariant: the newest state wins; a slow watcher skips intermediate states.

use std::sync::{Arc, Weak};

use model::cluster::ClusterState;
use tokio::sync::watch;

#[derive(Debug)]
pub struct ClusterPublisher(Arc<ClusterChannel>);

/// Gives access to the cluster state while its publisher exists.
#[derive(Clone, Debug)]
pub struct ClusterSubscription(Weak<ClusterChannel>);

#[derive(Debug)]
pub struct ClusterWatcher {
    /// The value of the label `service.kubernetes.io/service-proxy-name` of the Services that this proxy serves.
    pub proxy_name: Option<Arc<str>>,
    receiver: watch::Receiver<ClusterSnapshot>,
}

#[derive(Debug)]
struct ClusterChannel {
    proxy_name: Option<Arc<str>>,
    sender: watch::Sender<ClusterSnapshot>,
}

/// The cluster state, as far as the brain publishes it.
#[derive(Clone, Debug, Default)]
pub enum ClusterSnapshot {
    /// Not synced yet.
    #[default]
    Pending,
    State(Arc<ClusterState>),
    /// The brain follows the state of a single node, or watches a single Node, and has no cluster state.
    Unavailable,
}

impl ClusterPublisher {
    /// A publisher without a state. `proxy_name` is the value of the label `service.kubernetes.io/service-proxy-name` of
    /// the Services that this proxy serves.
    pub fn new(proxy_name: Option<&str>) -> Self {
        let proxy_name = proxy_name.map(Into::into);
        Self(Arc::new(ClusterChannel { proxy_name, sender: watch::Sender::default() }))
    }

    pub fn publish(&self, snapshot: ClusterSnapshot) {
        self.0.sender.send_replace(snapshot);
    }

    pub fn subscribe(&self) -> ClusterSubscription {
        ClusterSubscription(Arc::downgrade(&self.0))
    }
}

impl ClusterSubscription {
    pub fn watch(&self) -> ClusterWatcher {
        let Some(channel) = self.0.upgrade() else {
            // Closed, as that of any watcher is now.
            return ClusterWatcher { proxy_name: None, receiver: watch::channel(ClusterSnapshot::Pending).1 };
        };
        ClusterWatcher { proxy_name: channel.proxy_name.clone(), receiver: channel.sender.subscribe() }
    }
}

impl ClusterWatcher {
    /// Waits for a snapshot other than `seen` and [`ClusterSnapshot::Pending`]; `None` if the publisher was dropped.
    ///
    /// Cancel safe.
    pub async fn next(&mut self, seen: Option<&Arc<ClusterState>>) -> Option<ClusterSnapshot> {
        let is_new = |it: &ClusterSnapshot| match it {
            ClusterSnapshot::Pending => false,
            ClusterSnapshot::State(state) => seen.is_none_or(|seen| !Arc::ptr_eq(seen, state)),
            ClusterSnapshot::Unavailable => true,
        };
        Some(self.receiver.wait_for(is_new).await.ok()?.clone())
    }

    /// Waits until the publisher is dropped.
    pub async fn closed(&mut self) {
        while self.receiver.changed().await.is_ok() {}
    }
}
