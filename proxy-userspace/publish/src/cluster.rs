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
pub struct Cluster {
    proxy_name: Option<Arc<str>>,
    sender: watch::Sender<Known>,
    followers: Arc<Followers>,
}

/// Leads to the facts of a [`Cluster`].
#[derive(Clone, Debug)]
pub struct ClusterSubscription {
    proxy_name: Option<Arc<str>>,
    receiver: watch::Receiver<Known>,
    followers: Arc<Followers>,
}

/// Follows the facts of a [`Cluster`]: as long as there is one, they are wanted.
#[derive(Debug)]
pub struct ClusterFollower {
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
pub enum Known {
    /// Nothing yet.
    #[default]
    Nothing,
    /// All.
    Facts(Arc<ClusterState>),
    /// The state of one node, and no facts: another brain has them.
    NoFacts,
}

impl Cluster {
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
    pub fn publish(&self, known: Known) {
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
    pub fn is_followed(&self) -> bool {
        self.followers.count.load(Ordering::Relaxed) > 0
    }

    /// Waits until somebody begins to follow. Nothing is lost if it is dropped while it waits.
    pub async fn followed(&self) {
        self.followers.came.notified().await;
    }
}

impl ClusterSubscription {
    /// Begins to follow.
    pub fn follow(&self) -> ClusterFollower {
        self.followers.count.fetch_add(1, Ordering::Relaxed);
        self.followers.came.notify_one();
        ClusterFollower { subscription: self.clone() }
    }
}

impl Drop for ClusterFollower {
    fn drop(&mut self) {
        self.subscription.followers.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ClusterFollower {
    /// The label's value of Services that are served here.
    pub fn proxy_name(&self) -> Option<&Arc<str>> {
        self.subscription.proxy_name.as_ref()
    }

    /// Waits until something else is known than `seen`, and returns it; `None` if there will be nothing any more.
    ///
    /// Nothing is lost if it is dropped while it waits.
    pub async fn next(&mut self, seen: Option<&Arc<ClusterState>>) -> Option<Known> {
        let is_new = |it: &Known| match it {
            Known::Nothing => false,
            Known::Facts(facts) => seen.is_none_or(|seen| !Arc::ptr_eq(seen, facts)),
            Known::NoFacts => true,
        };
        Some(self.subscription.receiver.wait_for(is_new).await.ok()?.clone())
    }

    /// Waits until there will be nothing any more.
    pub async fn closed(&mut self) {
        while self.subscription.receiver.changed().await.is_ok() {}
    }
}
