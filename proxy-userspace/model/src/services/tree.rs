//! The tree behind the map: sorted leaves of Services, all at one depth.

use std::sync::Arc;

use crate::{ServiceName, state::ServiceState};

/// The most that a node holds: what a change copies, and how deep the tree is.
pub(super) const MOST: usize = 32;
/// A node with fewer is joined with its neighbour, if it fits in.
pub(super) const FEWEST: usize = 8;
/// What a node holds in a map that was made in one go: there is room for what comes.
const FILLED: usize = 24;

/// A node; never empty.
#[derive(Debug)]
pub(super) struct Node {
    /// No name in here comes before this one.
    pub(super) least: ServiceName,
    pub(super) kids: Kids,
}

/// What is in a node.
#[derive(Clone, Debug)]
pub(super) enum Kids {
    /// A leaf.
    Services(Vec<Arc<ServiceState>>),
    /// All of the same depth.
    Nodes(Vec<Arc<Node>>),
}

impl Node {
    /// A node with these kids; none if there are none.
    pub(super) fn new(kids: Kids) -> Option<Arc<Self>> {
        let least = match &kids {
            Kids::Services(states) => states.first()?.service.name.clone(),
            Kids::Nodes(nodes) => nodes.first()?.least.clone(),
        };
        Some(Arc::new(Self { least, kids }))
    }

    pub(super) fn get(&self, name: &ServiceName) -> Option<&Arc<ServiceState>> {
        match &self.kids {
            Kids::Services(states) => find(states, name).ok().and_then(|at| states.get(at)),
            Kids::Nodes(nodes) => nodes.get(child(nodes, name))?.get(name),
        }
    }
}

impl Kids {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Services(states) => states.len(),
            Self::Nodes(nodes) => nodes.len(),
        }
    }

    /// Both, if they are of one kind, as neighbours are.
    pub(super) fn join(&self, next: &Self) -> Option<Self> {
        match (self, next) {
            (Self::Services(a), Self::Services(b)) => Some(Self::Services([a.as_slice(), b].concat())),
            (Self::Nodes(a), Self::Nodes(b)) => Some(Self::Nodes([a.as_slice(), b].concat())),
            _ => None,
        }
    }

    /// One node, or two where it is too much for one, or none.
    pub(super) fn into_nodes(mut self) -> [Option<Arc<Node>>; 2] {
        let second = (self.len() > MOST).then(|| match &mut self {
            Self::Services(states) => Self::Services(states.split_off(states.len() / 2)),
            Self::Nodes(nodes) => Self::Nodes(nodes.split_off(nodes.len() / 2)),
        });
        [Node::new(self), second.and_then(Node::new)]
    }
}

/// Where a Service is in a leaf, or would be.
pub(super) fn find(states: &[Arc<ServiceState>], name: &ServiceName) -> Result<usize, usize> {
    states.binary_search_by(|it| it.service.name.cmp(name))
}

/// The child that has a Service, or would have it.
pub(super) fn child(nodes: &[Arc<Node>], name: &ServiceName) -> usize {
    nodes.partition_point(|it| it.least <= *name).saturating_sub(1)
}

/// A tree of Services in ascending order.
pub(super) fn build(states: Vec<Arc<ServiceState>>) -> Option<Arc<Node>> {
    let mut level: Vec<_> =
        states.chunks(FILLED).filter_map(|it| Node::new(Kids::Services(it.to_vec()))).collect();
    while level.len() > 1 {
        level = level.chunks(FILLED).filter_map(|it| Node::new(Kids::Nodes(it.to_vec()))).collect();
    }
    level.pop()
}
