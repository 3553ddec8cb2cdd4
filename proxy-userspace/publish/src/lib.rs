//! Revisions of a node's state, and how they are handed over.
//!
//! The one rule: the newest wins.
//! A state gets a revision only if it differs from the one before, and whoever is slow skips what was overtaken.

#![forbid(unsafe_code)]

pub mod cluster;
pub mod grpc;
pub mod node_registry;
pub mod print;
pub mod upstream;

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use model::state::NodeState;
use tokio::sync::watch;

pub use grpc::SubscribeError;
pub use node_registry::NodeRegistry;
pub use wire;

/// A state together with what tells it from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Random per process: a revision counts within it only.
    pub instance_id: u64,
    /// Counts the different states, from 1, of all nodes together; 0 means "nothing yet" and is never published.
    pub rev: u64,
    /// The node whose state it is.
    pub node: Arc<str>,
    /// The state.
    pub state: NodeState,
}

/// Gives the states of one node their revisions.
#[derive(Debug)]
pub struct Publisher {
    instance_id: u64,
    /// The last revision of all nodes: no two states of a process have the same.
    revisions: Arc<AtomicU64>,
    node: Arc<str>,
    sender: watch::Sender<Option<Arc<Published>>>,
}

impl Publisher {
    /// A publisher of the states of `node`, with nothing published yet.
    pub fn new(node: impl Into<Arc<str>>) -> Self {
        // Every RandomState has keys of its own, which come from the system's randomness.
        let instance_id = RandomState::new().build_hasher().finish();
        Self { instance_id, revisions: Arc::default(), node: node.into(), sender: watch::Sender::new(None) }
    }

    /// A publisher of the states of another node, under the same instance.
    pub fn for_node(&self, node: impl Into<Arc<str>>) -> Self {
        let revisions = Arc::clone(&self.revisions);
        Self { instance_id: self.instance_id, revisions, node: node.into(), sender: watch::Sender::new(None) }
    }

    /// The node.
    pub fn node(&self) -> &Arc<str> {
        &self.node
    }

    /// Publishes a state if it differs from the one before, and returns the revision that now holds.
    ///
    /// Services that are as they were are shared with the state before.
    pub fn publish(&self, mut state: NodeState) -> u64 {
        let mut rev = 0;
        self.sender.send_if_modified(|current| {
            if let Some(before) = current {
                state.reuse_equal(&before.state);
                rev = before.rev;
                if before.state == state {
                    return false;
                }
            }
            rev = self.revisions.fetch_add(1, Ordering::Relaxed) + 1;
            let node = Arc::clone(&self.node);
            let state = std::mem::take(&mut state);
            *current = Some(Arc::new(Published { instance_id: self.instance_id, rev, node, state }));
            true
        });
        rev
    }

    /// Publishes a state under a revision that another process has given to it.
    pub fn relay(&self, instance_id: u64, rev: u64, mut state: NodeState) {
        self.sender.send_modify(|current| {
            if let Some(current) = current {
                state.reuse_equal(&current.state);
            }
            let node = Arc::clone(&self.node);
            *current = Some(Arc::new(Published { instance_id, rev, node, state }));
        });
    }

    /// What is published now; none before the first state.
    pub fn current(&self) -> Option<Arc<Published>> {
        self.sender.borrow().clone()
    }

    /// How many follow what is published.
    pub fn subscribers(&self) -> usize {
        self.sender.receiver_count()
    }

    /// Follows what is published, beginning with what is there.
    pub fn subscribe(&self) -> Subscription {
        self.resume(self.instance_id, 0)
    }

    /// Follows what is published, beginning with what is not revision `rev` of the process `instance_id`.
    pub fn resume(&self, instance_id: u64, rev: u64) -> Subscription {
        Subscription::new(self.sender.subscribe(), (instance_id, rev))
    }
}

/// Follows what a [`Publisher`] publishes.
#[derive(Clone, Debug)]
pub struct Subscription {
    receiver: watch::Receiver<Option<Arc<Published>>>,
    /// Instance and revision of what was handed out last.
    seen: (u64, u64),
    /// Held as long as it is followed, where that is counted.
    _watcher: Option<grpc::Watchers>,
}

impl Subscription {
    fn new(receiver: watch::Receiver<Option<Arc<Published>>>, seen: (u64, u64)) -> Self {
        Self { receiver, seen, _watcher: None }
    }

    /// The same, counted among the watchers.
    pub(crate) fn counted(self, watcher: grpc::Watchers) -> Self {
        Self { _watcher: Some(watcher), ..self }
    }

    /// Another one of the same publisher, beginning with what is not revision `rev` of the process `instance_id`.
    pub fn resume(&self, instance_id: u64, rev: u64) -> Self {
        Self::new(self.receiver.clone(), (instance_id, rev))
    }

    /// Waits until the publisher is gone.
    pub async fn closed(&mut self) {
        // What is there is looked at by `next`, whether it was noticed here or not.
        while self.receiver.changed().await.is_ok() {}
    }

    /// Waits for a state that has not been handed out yet: the newest one. `None` if the publisher is gone.
    ///
    /// Nothing is lost if it is dropped while it waits.
    pub async fn next(&mut self) -> Option<Arc<Published>> {
        let seen = self.seen;
        let is_new =
            |it: &Option<Arc<Published>>| it.as_ref().is_some_and(|it| (it.instance_id, it.rev) != seen);
        let published = self.receiver.wait_for(is_new).await.ok()?.clone()?;
        self.seen = (published.instance_id, published.rev);
        Some(published)
    }
}

#[cfg(test)]
mod tests;
