//! The facts of the cluster, handed over to those who serve them to other brains.
//!
//! The one rule: the newest wins, as with states.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use model::cluster::ClusterState;
use tokio::sync::{Notify, watch};

/// Hands over the facts.
#[derive(Debug)]
pub struct ClusterPublisher {
    proxy_name: Option<Arc<str>>,
    sender: watch::Sender<ClusterSnapshot>,
    followers: Arc<Followers>,
}

/// Leads to the facts of a [`ClusterPublisher`].
#[derive(Clone, Debug)]
pub struct ClusterSubscription {
    proxy_name: Option<Arc<str>>,
    receiver: watch::Receiver<ClusterSnapshot>,
    followers: Arc<Followers>,
}

/// Follows the facts of a [`ClusterPublisher`]: as long as there is one, they are wanted.
#[derive(Debug)]
pub struct ClusterWatcher {
    subscription: ClusterSubscription,
}

/// How many follow.
#[derive(Debug, Default)]
struct Followers {
    count: AtomicUsize,
    came: Notify,
}

/// What is known of the cluster.
#[derive(Clone, Debug, Default)]
pub enum ClusterSnapshot {
    /// Nothing yet.
    #[default]
    Pending,
    /// All.
    State(Arc<ClusterState>),
    /// The state of one node, and no facts: another brain has them.
    Unavailable,
}

impl ClusterPublisher {
    /// Nothing is known yet; `proxy_name` is the value of the label `service.kubernetes.io/service-proxy-name` of the
    /// Services that are served here.
    pub fn new(proxy_name: Option<&str>) -> Self {
        Self {
            proxy_name: proxy_name.map(Into::into),
            sender: watch::Sender::default(),
            followers: Arc::default(),
        }
    }

    /// Hands over what is known now.
    pub fn publish(&self, known: ClusterSnapshot) {
        self.sender.send_replace(known);
    }

    /// Leads those who serve to what is known.
    pub fn subscribe(&self) -> ClusterSubscription {
        ClusterSubscription {
            proxy_name: self.proxy_name.clone(),
            receiver: self.sender.subscribe(),
            followers: Arc::clone(&self.followers),
        }
    }

    /// Whether somebody follows. Facts that nobody follows need not be handed over.
    pub fn has_watchers(&self) -> bool {
        self.followers.count.load(Ordering::Relaxed) > 0
    }

    /// Waits until somebody begins to follow. Nothing is lost if it is dropped while it waits.
    pub async fn watcher_joined(&self) {
        self.followers.came.notified().await;
    }
}

impl ClusterSubscription {
    /// Begins to follow.
    pub fn watch(&self) -> ClusterWatcher {
        self.followers.count.fetch_add(1, Ordering::Relaxed);
        self.followers.came.notify_one();
        ClusterWatcher { subscription: self.clone() }
    }
}

impl Drop for ClusterWatcher {
    fn drop(&mut self) {
        self.subscription.followers.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ClusterWatcher {
    /// The label's value of Services that are served here.
    pub fn proxy_name(&self) -> Option<&Arc<str>> {
        self.subscription.proxy_name.as_ref()
    }

    /// Waits until something else is known than `seen`, and returns it; `None` if there will be nothing any more.
    ///
    /// Nothing is lost if it is dropped while it waits.
    pub async fn next(&mut self, seen: Option<&Arc<ClusterState>>) -> Option<ClusterSnapshot> {
        let is_new = |it: &ClusterSnapshot| match it {
            ClusterSnapshot::Pending => false,
            ClusterSnapshot::State(facts) => seen.is_none_or(|seen| !Arc::ptr_eq(seen, facts)),
            ClusterSnapshot::Unavailable => true,
        };
        Some(self.subscription.receiver.wait_for(is_new).await.ok()?.clone())
    }

    /// Waits until there will be nothing any more.
    pub async fn closed(&mut self) {
        while self.subscription.receiver.changed().await.is_ok() {}
    }
}
