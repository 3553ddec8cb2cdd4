//! The persistent B-tree behind [`Services`](super::Services): sorted leaves, all at the same depth.

use std::sync::Arc;

use crate::{ServiceName, state::ServiceState};

/// The maximum number of children of a node; it bounds what a change copies.
pub(super) const MAX_CHILDREN: usize = 32;
/// A node with fewer children is merged with a neighbour, if both fit into one.
pub(super) const MIN_CHILDREN: usize = 8;
/// The number of children in a tree that is built in one go: it leaves room for inserts.
const INITIAL_CHILDREN: usize = 24;

/// A sorted tree of Services; copies share all nodes.
#[derive(Clone, Debug, Default)]
pub(super) struct Tree {
    pub(super) root: Option<Arc<TreeNode>>,
    /// The number of Services.
    pub(super) len: usize,
}

/// A node; never empty.
#[derive(Debug)]
pub(super) struct TreeNode {
    /// The first name in this subtree, or one before it.
    pub(super) least: ServiceName,
    pub(super) children: Children,
}

/// The children of a node.
#[derive(Clone, Debug)]
pub(super) enum Children {
    /// The node is a leaf.
    Services(Vec<Arc<ServiceState>>),
    /// All of the same depth.
    Nodes(Vec<Arc<TreeNode>>),
}

impl Tree {
    /// A tree of Services in ascending order.
    pub(super) fn build(states: &[Arc<ServiceState>]) -> Self {
        let leaves = states.chunks(INITIAL_CHILDREN);
        let mut level: Vec<_> =
            leaves.filter_map(|it| TreeNode::new(Children::Services(it.to_vec()))).collect();
        while level.len() > 1 {
            let nodes = level.chunks(INITIAL_CHILDREN);
            level = nodes.filter_map(|it| TreeNode::new(Children::Nodes(it.to_vec()))).collect();
        }
        Self { root: level.pop(), len: states.len() }
    }

    pub(super) fn get(&self, name: &ServiceName) -> Option<&Arc<ServiceState>> {
        let mut node = self.root.as_ref()?;
        loop {
            match &node.children {
                Children::Services(states) => return states.get(find(states, name).ok()?),
                Children::Nodes(nodes) => node = nodes.get(child(nodes, name))?,
            }
        }
    }
}

impl TreeNode {
    /// A node with these children; none if there are none.
    pub(super) fn new(children: Children) -> Option<Arc<Self>> {
        let least = match &children {
            Children::Services(states) => states.first()?.service.name.clone(),
            Children::Nodes(nodes) => nodes.first()?.least.clone(),
        };
        Some(Arc::new(Self { least, children }))
    }
}

impl Children {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Services(states) => states.len(),
            Self::Nodes(nodes) => nodes.len(),
        }
    }

    /// Both, if they are of the same kind, as those of neighbours are.
    pub(super) fn join(&self, next: &Self) -> Option<Self> {
        match (self, next) {
            (Self::Services(a), Self::Services(b)) => Some(Self::Services([a.as_slice(), b].concat())),
            (Self::Nodes(a), Self::Nodes(b)) => Some(Self::Nodes([a.as_slice(), b].concat())),
            _ => None,
        }
    }

    /// No node, one, or two if there are too many children for one.
    pub(super) fn into_nodes(mut self) -> [Option<Arc<TreeNode>>; 2] {
        let second = (self.len() > MAX_CHILDREN).then(|| match &mut self {
            Self::Services(states) => Self::Services(states.split_off(states.len() / 2)),
            Self::Nodes(nodes) => Self::Nodes(nodes.split_off(nodes.len() / 2)),
        });
        [TreeNode::new(self), second.and_then(TreeNode::new)]
    }
}

/// The position of a Service in a leaf, or where to insert it.
pub(super) fn find(states: &[Arc<ServiceState>], name: &ServiceName) -> Result<usize, usize> {
    states.binary_search_by(|it| it.service.name.cmp(name))
}

/// The child that contains a Service, or into which to insert it.
pub(super) fn child(nodes: &[Arc<TreeNode>], name: &ServiceName) -> usize {
    nodes.partition_point(|it| it.least <= *name).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::Service;

    fn services(count: usize) -> Children {
        let state =
            |number| ServiceState::new(Service::new(ServiceName::new("ns", format!("s{number:05}"))), []);
        Children::Services((0..count).map(|it| Arc::new(state(it))).collect())
    }

    fn nodes(count: usize) -> Children {
        Children::Nodes((0..count).filter_map(|_| TreeNode::new(services(1))).collect())
    }

    #[test]
    fn children_that_are_too_many_for_one_node_are_halved() {
        for children in [services, nodes] {
            for (count, expect) in [(0, [None, None]), (32, [Some(32), None]), (33, [Some(16), Some(17)])] {
                let sizes = children(count).into_nodes().map(|it| it.map(|it| it.children.len()));
                assert_eq!(sizes, expect, "{count}");
            }
        }
    }

    #[test]
    fn children_of_one_kind_are_joined() {
        let size = |it: Option<Children>| it.map(|it| it.len());
        assert_eq!(size(services(2).join(&services(3))), Some(5));
        assert_eq!(size(nodes(2).join(&nodes(3))), Some(5));
        assert_eq!(size(nodes(2).join(&services(3))), None);
    }
}
