//! Any node's state, for as long as somebody follows it.
//!
//! The one rule: what nobody follows is not derived.
//! A node is asked for when it is first followed, and let go of a while after its last follower has gone, so that a
//! reconnect is cheap.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use model::state::{self, NodeState};
use tokio::sync::Notify;

use crate::{Publisher, SubscribeError, Subscription, grpc::NodeStates};

/// How often to look for nodes that nobody follows any more: they are let go of at the second look.
pub const IDLE_CHECK_INTERVAL: Duration = Duration::from_secs(15);

/// The most nodes that are followed although no Node object is called so: as many as a cluster may have.
const MOST_STRANGERS: usize = 5_000;

/// The longest name of a node.
const LONGEST_NAME: usize = 253;

/// The nodes that are followed besides the brain's own. The brain holds this; who serves holds [`NodeRequests`].
#[derive(Debug)]
pub struct NodeRegistry {
    shared: Arc<Shared>,
}

/// Hands out the state of any node, as long as the brain holds the [`NodeRegistry`] it came from.
#[derive(Clone, Debug)]
pub struct NodeRequests {
    own: Arc<str>,
    /// The brain's own node is followed by this.
    states: Subscription,
    shared: Weak<Shared>,
}

#[derive(Debug)]
struct Shared {
    table: Mutex<Table>,
    asked: Notify,
}

#[derive(Debug)]
struct Table {
    own: Publisher,
    nodes: HashMap<Arc<str>, Followed>,
    /// How many of them were strangers when they were asked for.
    strangers: usize,
    /// Asked for, and not yet told to the brain.
    asked: Vec<Arc<str>>,
    /// The Nodes that there are; none if there are no facts to decide the state of any node but the own one by.
    known: Option<state::NodeInfos>,
}

#[derive(Debug)]
struct Followed {
    publisher: Publisher,
    is_stranger: bool,
    /// Whether nobody followed it at the last look.
    is_idle: bool,
}

impl NodeRegistry {
    /// All nodes, beside the one of `own`.
    pub fn new(own: Publisher) -> Self {
        let table = Table {
            own,
            nodes: HashMap::new(),
            strangers: 0,
            asked: Vec::new(),
            known: Some(state::NodeInfos::default()),
        };
        Self { shared: Arc::new(Shared { table: Mutex::new(table), asked: Notify::new() }) }
    }

    /// Who serves needs this.
    pub fn requests(&self) -> NodeRequests {
        let table = self.shared.table();
        let states = table.own.subscribe();
        NodeRequests { own: Arc::clone(table.own.node()), states, shared: Arc::downgrade(&self.shared) }
    }

    /// Waits for nodes that are asked for and have not been handed out here before.
    ///
    /// Nothing is lost if it is dropped while it waits.
    pub async fn requested(&self) -> Vec<Arc<str>> {
        loop {
            let asked = std::mem::take(&mut self.shared.table().asked);
            if !asked.is_empty() {
                return asked;
            }
            self.shared.asked.notified().await;
        }
    }

    /// Takes note of the Nodes that there are.
    pub fn set_cluster_nodes(&self, nodes: state::NodeInfos) {
        self.shared.table().known = Some(nodes);
    }

    /// Takes note that there are no facts: lets go of all nodes but the own one, and returns them. Who follows one is told
    /// that it is the end, and refused from now on, until something is learned again.
    pub fn clear(&self) -> Vec<Arc<str>> {
        let mut table = self.shared.table();
        table.known = None;
        table.strangers = 0;
        table.asked.clear();
        table.nodes.drain().map(|(name, _)| name).collect()
    }

    /// Publishes the state of a node, the own one or one that is followed.
    pub fn publish(&self, node: &str, state: NodeState) {
        let table = self.shared.table();
        if let Some(publisher) = table.publisher(node) {
            publisher.publish(state);
        }
    }

    /// Lets go of the nodes that nobody has followed since the last look, and returns them. To be called every [`IDLE_CHECK_INTERVAL`].
    pub fn remove_idle(&self) -> Vec<Arc<str>> {
        let mut table = self.shared.table();
        let mut gone = Vec::new();
        for (name, it) in &mut table.nodes {
            let was_idle = std::mem::replace(&mut it.is_idle, it.publisher.subscribers() == 0);
            if was_idle && it.is_idle {
                gone.push(Arc::clone(name));
            }
        }
        for name in &gone {
            if table.nodes.remove(name).is_some_and(|it| it.is_stranger) {
                table.strangers -= 1;
            }
        }
        table.asked.retain(|it| !gone.contains(it));
        gone
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        // Whatever panicked had not half changed it.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn publisher(&self, node: &str) -> Option<&Publisher> {
        if *node == **self.own.node() {
            return Some(&self.own);
        }
        self.nodes.get(node).map(|it| &it.publisher)
    }

    /// Adds a node that has not been followed.
    fn add(&mut self, node: &str) -> Result<(), SubscribeError> {
        let known = self.known.as_ref().ok_or(SubscribeError::NoClusterState)?;
        let is_stranger = !known.contains_key(node);
        if is_stranger && self.strangers >= MOST_STRANGERS {
            return Err(SubscribeError::TooManyUnknownNodes(MOST_STRANGERS));
        }
        let name: Arc<str> = node.into();
        let publisher = self.own.for_node(Arc::clone(&name));
        self.strangers += usize::from(is_stranger);
        self.nodes.insert(Arc::clone(&name), Followed { publisher, is_stranger, is_idle: false });
        self.asked.push(name);
        Ok(())
    }
}

impl NodeStates for NodeRequests {
    fn subscribe(&self, node: &str, seen: (u64, u64)) -> Result<Subscription, SubscribeError> {
        if node.is_empty() || *node == *self.own {
            return Ok(self.states.resume(seen.0, seen.1));
        }
        let fits = |it: u8| it.is_ascii_lowercase() || it.is_ascii_digit() || it == b'-' || it == b'.';
        if node.len() > LONGEST_NAME || !node.bytes().all(fits) {
            return Err(SubscribeError::InvalidName);
        }
        let shared = self.shared.upgrade().ok_or(SubscribeError::ShuttingDown)?;
        let mut table = shared.table();
        match table.nodes.get_mut(node) {
            Some(it) => it.is_idle = false,
            None => {
                table.add(node)?;
                shared.asked.notify_one();
            }
        }
        let publisher = table.publisher(node).ok_or(SubscribeError::ShuttingDown)?;
        Ok(publisher.resume(seen.0, seen.1))
    }
}
