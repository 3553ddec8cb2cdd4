//! The facts of the cluster, handed over to those who serve them to other brains.
//!
//! The one rule: the newest wins, as with states.

use std::sync::Arc;

use model::facts::Facts;
use tokio::sync::watch;

/// Hands over the facts.
#[derive(Debug)]
pub struct Cluster {
    proxy_name: Option<Arc<str>>,
    sender: watch::Sender<Known>,
}

/// Follows the facts of a [`Cluster`].
#[derive(Clone, Debug)]
pub struct ClusterSubscription {
    proxy_name: Option<Arc<str>>,
    receiver: watch::Receiver<Known>,
}

/// What is known of the cluster.
#[derive(Clone, Debug, Default)]
pub enum Known {
    /// Nothing yet.
    #[default]
    Nothing,
    /// All.
    Facts(Arc<Facts>),
    /// The state of one node, and no facts: another brain has them.
    NoFacts,
}

impl Cluster {
    /// Nothing is known yet; `proxy_name` is the value of the label `service.kubernetes.io/service-proxy-name` of the
    /// Services that are served here.
    pub fn new(proxy_name: Option<&str>) -> Self {
        Self { proxy_name: proxy_name.map(Into::into), sender: watch::Sender::default() }
    }

    /// Hands over what is known now.
    pub fn publish(&self, known: Known) {
        self.sender.send_replace(known);
    }

    /// Follows what is known.
    pub fn subscribe(&self) -> ClusterSubscription {
        ClusterSubscription { proxy_name: self.proxy_name.clone(), receiver: self.sender.subscribe() }
    }
}

impl ClusterSubscription {
    /// The label's value of Services that are served here.
    pub fn proxy_name(&self) -> Option<&Arc<str>> {
        self.proxy_name.as_ref()
    }

    /// Waits until something else is known than `seen`, and returns it; `None` if there will be nothing any more.
    ///
    /// Nothing is lost if it is dropped while it waits.
    pub async fn next(&mut self, seen: Option<&Arc<Facts>>) -> Option<Known> {
        let is_new = |it: &Known| match it {
            Known::Nothing => false,
            Known::Facts(facts) => seen.is_none_or(|seen| !Arc::ptr_eq(seen, facts)),
            Known::NoFacts => true,
        };
        Some(self.receiver.wait_for(is_new).await.ok()?.clone())
    }

    /// Waits until there will be nothing any more.
    pub async fn closed(&mut self) {
        while self.receiver.changed().await.is_ok() {}
    }
}
