//! A publisher of one node's states, and subscriptions to it.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use model::state::NodeState;
use tokio::{sync::watch, time::Instant};

/// A state and its revision.
#[derive(Clone, Debug)]
pub struct Published {
    /// Random per process: revisions of different instances cannot be compared.
    pub instance_id: u64,
    /// Counts the states of all nodes together, from 1.
    pub rev: u64,
    pub node: Arc<str>,
    /// The revisions of the last changes of its parts.
    changed: PartRevisions,
    /// When it was published.
    pub(crate) at: Instant,
    pub state: NodeState,
}

/// The revision at which each part of a state has changed last.
#[derive(Clone, Copy, Debug)]
struct PartRevisions {
    services: u64,
    nodes: u64,
    service_cidrs: u64,
    pods: u64,
}

impl PartRevisions {
    fn new(rev: u64, state: &NodeState, previous: Option<&Published>) -> Self {
        let part = |is_equal: fn(&NodeState, &NodeState) -> bool, before: fn(&Self) -> u64| match previous {
            Some(it) if is_equal(&it.state, state) => before(&it.changed),
            _ => rev,
        };
        Self {
            services: part(|a, b| a.services == b.services, |it| it.services),
            nodes: part(|a, b| a.nodes == b.nodes, |it| it.nodes),
            service_cidrs: part(|a, b| a.service_cidrs == b.service_cidrs, |it| it.service_cidrs),
            pods: part(|a, b| a.pods == b.pods, |it| it.pods),
        }
    }
}

impl Published {
    /// A first state.
    pub fn new(instance_id: u64, rev: u64, node: impl Into<Arc<str>>, state: NodeState) -> Self {
        let (changed, at) = (PartRevisions::new(rev, &state, None), Instant::now());
        Self { instance_id, rev, node: node.into(), changed, at, state }
    }

    /// Its instance and its revision, which identify it.
    pub fn revision(&self) -> (u64, u64) {
        (self.instance_id, self.rev)
    }

    /// The revision for a client that receives the nodes, the ServiceCIDRs and the pods only if the argument is true. It stays the
    /// same while nothing changes for that client.
    pub fn rev_for(&self, nodes: bool, service_cidrs: bool, pods: bool) -> u64 {
        let changed = self.changed;
        let optional = [(nodes, changed.nodes), (service_cidrs, changed.service_cidrs), (pods, changed.pods)];
        optional
            .into_iter()
            .filter(|(is_received, _)| *is_received)
            .fold(changed.services, |rev, it| rev.max(it.1))
    }
}

/// Publishes the states of one node under revisions.
#[derive(Debug)]
pub struct Publisher {
    pub(crate) instance_id: u64,
    /// The last revision of all nodes: no two states of a process have the same one.
    last_rev: Arc<AtomicU64>,
    pub(crate) node: Arc<str>,
    sender: watch::Sender<Option<Arc<Published>>>,
}

impl Publisher {
    /// A publisher of the states of `node`; nothing is published yet.
    pub fn new(node: impl Into<Arc<str>>) -> Self {
        // The keys of a RandomState come from the system's randomness.
        let instance_id = RandomState::new().build_hasher().finish();
        Self { instance_id, last_rev: Arc::default(), node: node.into(), sender: watch::Sender::new(None) }
    }

    /// A publisher of the states of another node, under the same instance.
    pub fn for_node(&self, node: impl Into<Arc<str>>) -> Self {
        let last_rev = Arc::clone(&self.last_rev);
        Self { instance_id: self.instance_id, last_rev, node: node.into(), sender: watch::Sender::new(None) }
    }

    /// Publishes a state if it differs from the previous one, and returns the current revision.
    ///
    /// Unchanged Services are shared with the previous state.
    pub fn publish(&self, mut state: NodeState) -> u64 {
        let mut rev = 0;
        self.sender.send_if_modified(|current| {
            if let Some(previous) = current {
                state.reuse_equal(&previous.state);
                rev = previous.rev;
                if previous.state == state {
                    return false;
                }
            }
            rev = self.last_rev.fetch_add(1, Ordering::Relaxed) + 1;
            *current = Some(self.published(self.instance_id, rev, state, current.as_deref()));
            true
        });
        rev
    }

    /// Publishes a state under the revision that another process gave it.
    pub fn relay(&self, instance_id: u64, rev: u64, mut state: NodeState) {
        self.sender.send_modify(|current| {
            if let Some(current) = current {
                state.reuse_equal(&current.state);
            }
            let previous = current.as_deref().filter(|it| it.instance_id == instance_id);
            *current = Some(self.published(instance_id, rev, state, previous));
        });
    }

    fn published(
        &self,
        instance_id: u64,
        rev: u64,
        state: NodeState,
        previous: Option<&Published>,
    ) -> Arc<Published> {
        let changed = PartRevisions::new(rev, &state, previous);
        let at = Instant::now();
        Arc::new(Published { instance_id, rev, node: Arc::clone(&self.node), changed, at, state })
    }

    /// The current state; `None` before the first one.
    pub fn current(&self) -> Option<Arc<Published>> {
        self.sender.borrow().clone()
    }

    pub fn subscribers(&self) -> usize {
        self.sender.receiver_count()
    }

    /// A subscription that starts with the current state.
    pub fn subscribe(&self) -> Subscription {
        Subscription { receiver: self.sender.subscribe(), seen: None, _counter: None }
    }
}

/// A subscription to the states of a [`Publisher`].
#[derive(Clone, Debug)]
pub struct Subscription {
    receiver: watch::Receiver<Option<Arc<Published>>>,
    /// Instance and revision of the last state that was returned.
    seen: Option<(u64, u64)>,
    /// Held while the subscription exists, if it is counted.
    _counter: Option<Arc<()>>,
}

impl Subscription {
    /// Holds `counter` while it exists.
    pub(crate) fn counted(self, counter: Arc<()>) -> Self {
        Self { _counter: Some(counter), ..self }
    }

    /// Another subscription to the same publisher, that starts with the current state.
    pub fn resubscribe(&self) -> Self {
        Self { receiver: self.receiver.clone(), seen: None, _counter: None }
    }

    /// The newest state; `None` before the first one.
    pub fn current(&self) -> Option<Arc<Published>> {
        self.receiver.borrow().clone()
    }

    /// Waits until the publisher is dropped.
    pub async fn closed(&mut self) {
        // `next` compares revisions, so that it does not miss what this loop has seen.
        while self.receiver.changed().await.is_ok() {}
    }

    /// Waits for a state that was not returned yet, and returns the newest; `None` if the publisher was dropped.
    ///
    /// Cancel safe.
    pub async fn next(&mut self) -> Option<Arc<Published>> {
        let seen = self.seen;
        let is_new = |it: &Option<Arc<Published>>| it.as_ref().is_some_and(|it| Some(it.revision()) != seen);
        let published = self.receiver.wait_for(is_new).await.ok()?.clone()?;
        self.seen = Some(published.revision());
        Some(published)
    }
}
