//! Access to the states of nodes, by name.

use std::{
    fmt,
    sync::{Arc, Weak},
};

use metrics::MetricWriter;
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder};

use crate::publisher::Subscription;

/// The nodes whose states a gRPC server serves.
pub trait NodeStates: Send + Sync + 'static {
    /// Subscribes to the states of a node, or of the brain's own node if the name is empty, from the current state on.
    fn subscribe(&self, node: &str) -> Result<Subscription, SubscribeError>;
}

/// Why a node's state is not available.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubscribeError {
    /// Only the brain's own node is served.
    #[error(
        "this brain serves only its own node; ask the node's own brain, or start this one with --serve-any-node"
    )]
    NotServed,
    /// The brain follows another one that gives it the state of its own node, but no cluster state.
    #[error(
        "this brain cannot compute the state of this node: the brain that it follows serves no cluster state \
         (globalv1.Sets), only the state of one node; ask that brain for this node"
    )]
    NoClusterState,
    /// The name is not valid for a node.
    #[error("invalid node name: only lower-case letters, digits, dashes and dots are allowed, at most 253")]
    InvalidName,
    /// The limit of nodes without a Node object is reached.
    #[error("no Node object has this name, and {0} such nodes are already served")]
    TooManyUnknownNodes(usize),
    /// The brain is shutting down.
    #[error("the brain is shutting down")]
    ShuttingDown,
}

#[derive(Clone, Debug)]
pub struct SingleNode {
    name: Arc<str>,
    states: Subscription,
}

impl SingleNode {
    pub fn new(name: impl Into<Arc<str>>, states: Subscription) -> Self {
        Self { name: name.into(), states }
    }
}

impl NodeStates for SingleNode {
    fn subscribe(&self, node: &str) -> Result<Subscription, SubscribeError> {
        let is_own = node.is_empty() || *node == *self.name;
        if is_own { Ok(self.states.resubscribe()) } else { Err(SubscribeError::NotServed) }
    }
}

/// Counts the subscriptions to nodes.
pub struct CountedNodes {
    nodes: Arc<dyn NodeStates>,
    /// Each subscription holds a clone.
    counter: Arc<()>,
}

impl CountedNodes {
    pub fn new(nodes: Arc<dyn NodeStates>) -> Self {
        Self { nodes, counter: Arc::default() }
    }

    pub fn watchers(&self) -> Watchers {
        Watchers(Arc::downgrade(&self.counter))
    }
}

#[derive(Clone, Debug)]
pub struct Watchers(Weak<()>);

impl Watchers {
    pub fn count(&self) -> usize {
        // One clone is that of the nodes.
        self.0.strong_count().saturating_sub(1)
    }
}

impl Collector for Watchers {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        MetricWriter::own(&mut encoder).gauge("watchers", self.count() as f64)
    }
}

impl NodeStates for CountedNodes {
    fn subscribe(&self, node: &str) -> Result<Subscription, SubscribeError> {
        Ok(self.nodes.subscribe(node)?.counted(Arc::clone(&self.counter)))
    }
}
