//! The states of any node on request.
//!
//! Invariant: only requested nodes are computed.
//! A node is added when a client first subscribes to it, and removed some time after its last subscriber has gone, so that
//! a reconnect costs nothing.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use model::state::{NodeInfos, NodeState};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{
    node_states::{NodeStates, SubscribeError},
    publisher::{Publisher, Subscription},
};

/// The interval at which to call [`NodeRegistry::remove_idle`], which removes a node at the second call without a subscriber.
pub const IDLE_CHECK_INTERVAL: Duration = Duration::from_secs(15);

/// The limit of nodes without a Node object: the largest supported number of nodes of a cluster.
const MAX_UNKNOWN_NODES: usize = 5_000;

const MAX_NAME_LENGTH: usize = 253;

/// The nodes that clients have requested, beside the brain's own. The brain holds it; the server holds [`NodeRequests`].
#[derive(Debug)]
pub struct NodeRegistry {
    registry: Arc<Registry>,
}

/// Subscribes to the states of any node while its [`NodeRegistry`] exists.
#[derive(Clone, Debug)]
pub struct NodeRequests {
    own_name: Arc<str>,
    /// The states of the brain's own node.
    own_states: Subscription,
    registry: Weak<Registry>,
}

#[derive(Debug)]
struct Registry {
    nodes: Mutex<Nodes>,
    request_added: Notify,
}

#[derive(Debug)]
struct Nodes {
    own: Publisher,
    requested: HashMap<Arc<str>, RequestedNode>,
    /// The number of requested nodes that had no Node object when they were requested.
    unknown_nodes: usize,
    /// The requests that the brain has not taken yet.
    new_requests: Vec<Arc<str>>,
    /// The nodes of the cluster; `None` if there is no cluster state to compute other nodes from.
    cluster_nodes: Option<NodeInfos>,
}

#[derive(Debug)]
struct RequestedNode {
    publisher: Publisher,
    is_unknown: bool,
    /// Whether it had no subscriber at the last check.
    is_idle: bool,
}

impl NodeRegistry {
    /// A registry beside the node of `own`.
    pub fn new(own: Publisher) -> Self {
        let nodes = Nodes {
            own,
            requested: HashMap::new(),
            unknown_nodes: 0,
            new_requests: Vec::new(),
            cluster_nodes: Some(NodeInfos::default()),
        };
        Self { registry: Arc::new(Registry { nodes: Mutex::new(nodes), request_added: Notify::new() }) }
    }

    /// The server's access to the registry.
    pub fn requests(&self) -> NodeRequests {
        let nodes = self.registry.nodes.lock();
        NodeRequests {
            own_name: Arc::clone(&nodes.own.node),
            own_states: nodes.own.subscribe(),
            registry: Arc::downgrade(&self.registry),
        }
    }

    /// Waits for new requests, and returns each once. Cancel safe.
    pub async fn requested(&self) -> Vec<Arc<str>> {
        loop {
            let requests = std::mem::take(&mut self.registry.nodes.lock().new_requests);
            if !requests.is_empty() {
                return requests;
            }
            self.registry.request_added.notified().await;
        }
    }

    /// Sets the nodes that have a Node object.
    pub fn set_cluster_nodes(&self, nodes: NodeInfos) {
        self.registry.nodes.lock().cluster_nodes = Some(nodes);
    }

    /// There is no cluster state any more: removes all nodes but the own one, and returns them. Their subscriptions end, and
    /// new ones fail until [`set_cluster_nodes`](Self::set_cluster_nodes).
    pub fn clear(&self) -> Vec<Arc<str>> {
        let mut nodes = self.registry.nodes.lock();
        nodes.cluster_nodes = None;
        nodes.unknown_nodes = 0;
        nodes.new_requests.clear();
        nodes.requested.drain().map(|(name, _)| name).collect()
    }

    /// Publishes the state of a node, if it is the own one or a requested one; returns its instance and revision.
    pub fn publish(&self, node: &str, state: NodeState) -> Option<(u64, u64)> {
        let nodes = self.registry.nodes.lock();
        let publisher = nodes.publisher(node)?;
        let rev = publisher.publish(state);
        Some((publisher.instance_id, rev))
    }

    /// Removes the nodes that have had no subscriber since the last call, and returns them. To be called every
    /// [`IDLE_CHECK_INTERVAL`].
    pub fn remove_idle(&self) -> Vec<Arc<str>> {
        let mut nodes = self.registry.nodes.lock();
        let mut idle = Vec::new();
        for (name, it) in &mut nodes.requested {
            let was_idle = std::mem::replace(&mut it.is_idle, it.publisher.subscribers() == 0);
            if was_idle && it.is_idle {
                idle.push(Arc::clone(name));
            }
        }
        for name in &idle {
            if nodes.requested.remove(name).is_some_and(|it| it.is_unknown) {
                nodes.unknown_nodes -= 1;
            }
        }
        nodes.new_requests.retain(|it| !idle.contains(it));
        idle
    }
}

impl Nodes {
    fn publisher(&self, node: &str) -> Option<&Publisher> {
        if *node == *self.own.node {
            return Some(&self.own);
        }
        self.requested.get(node).map(|it| &it.publisher)
    }

    fn add(&mut self, node: &str) -> Result<(), SubscribeError> {
        let cluster_nodes = self.cluster_nodes.as_ref().ok_or(SubscribeError::NoClusterState)?;
        let is_unknown = !cluster_nodes.contains_key(node);
        if is_unknown && self.unknown_nodes >= MAX_UNKNOWN_NODES {
            return Err(SubscribeError::TooManyUnknownNodes(MAX_UNKNOWN_NODES));
        }
        let name: Arc<str> = node.into();
        let publisher = self.own.for_node(Arc::clone(&name));
        self.unknown_nodes += usize::from(is_unknown);
        self.requested.insert(Arc::clone(&name), RequestedNode { publisher, is_unknown, is_idle: false });
        self.new_requests.push(name);
        Ok(())
    }
}

impl NodeStates for NodeRequests {
    fn subscribe(&self, node: &str) -> Result<Subscription, SubscribeError> {
        if node.is_empty() || *node == *self.own_name {
            return Ok(self.own_states.resubscribe());
        }
        let is_valid = |it: u8| it.is_ascii_lowercase() || it.is_ascii_digit() || it == b'-' || it == b'.';
        if node.len() > MAX_NAME_LENGTH || !node.bytes().all(is_valid) {
            return Err(SubscribeError::InvalidName);
        }
        let registry = self.registry.upgrade().ok_or(SubscribeError::ShuttingDown)?;
        let mut nodes = registry.nodes.lock();
        match nodes.requested.get_mut(node) {
            Some(it) => it.is_idle = false,
            None => {
                nodes.add(node)?;
                registry.request_added.notify_one();
            }
        }
        let publisher = nodes.publisher(node).ok_or(SubscribeError::ShuttingDown)?;
        Ok(publisher.subscribe())
    }
}
