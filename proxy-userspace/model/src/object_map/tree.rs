//! The persistent B-tree behind [`ObjectMap`](super::ObjectMap): sorted leaves, all at the same depth.

use std::{borrow::Borrow, fmt, sync::Arc};

/// The maximum number of children of a node; it bounds what a change copies.
pub(super) const MAX_CHILDREN: usize = 32;
/// A node with fewer children is merged with a neighbor, if both fit into one.
pub(super) const MIN_CHILDREN: usize = 8;
/// The number of children in a tree that is built in one go: it leaves room for inserts.
const INITIAL_CHILDREN: usize = 24;

/// An object that has its key in it.
pub trait Keyed {
    type Key: Ord + Clone + fmt::Debug;

    fn key(&self) -> &Self::Key;
}

/// A node; never empty.
pub(super) struct TreeNode<T: Keyed> {
    /// The first key in this subtree, or one before it.
    pub(super) least: T::Key,
    pub(super) children: Children<T>,
}

pub(super) enum Children<T: Keyed> {
    /// The node is a leaf.
    Objects(Vec<Arc<T>>),
    /// All of the same depth.
    Nodes(Vec<Arc<TreeNode<T>>>),
}

impl<T: Keyed> TreeNode<T> {
    /// The root of a tree of objects in ascending order.
    pub(super) fn tree_of(objects: &[Arc<T>]) -> Option<Arc<Self>> {
        let leaves = objects.chunks(INITIAL_CHILDREN);
        let mut level: Vec<_> = leaves.filter_map(|it| Self::new(Children::Objects(it.to_vec()))).collect();
        while level.len() > 1 {
            let nodes = level.chunks(INITIAL_CHILDREN);
            level = nodes.filter_map(|it| Self::new(Children::Nodes(it.to_vec()))).collect();
        }
        level.pop()
    }

    pub(super) fn get<Q>(&self, key: &Q) -> Option<&Arc<T>>
    where
        T::Key: Borrow<Q>,
        Q: Ord + ?Sized,
    {
        match &self.children {
            Children::Objects(objects) => objects.get(find(objects, key).ok()?),
            Children::Nodes(nodes) => nodes.get(child(nodes, key))?.get(key),
        }
    }

    /// The first object after a key.
    pub(super) fn after(&self, key: &T::Key) -> Option<&Arc<T>> {
        match &self.children {
            Children::Objects(objects) => objects.get(objects.partition_point(|it| it.key() <= key)),
            Children::Nodes(nodes) => nodes[child(nodes, key)..].iter().find_map(|it| it.after(key)),
        }
    }

    /// A node with these children; none if there are none.
    pub(super) fn new(children: Children<T>) -> Option<Arc<Self>> {
        let least = match &children {
            Children::Objects(objects) => objects.first()?.key().clone(),
            Children::Nodes(nodes) => nodes.first()?.least.clone(),
        };
        Some(Arc::new(Self { least, children }))
    }
}

impl<T: Keyed> Children<T> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Objects(objects) => objects.len(),
            Self::Nodes(nodes) => nodes.len(),
        }
    }

    /// Both, if they are of the same kind, as those of neighbors are.
    pub(super) fn join(&self, next: &Self) -> Option<Self> {
        match (self, next) {
            (Self::Objects(a), Self::Objects(b)) => Some(Self::Objects([a.as_slice(), b].concat())),
            (Self::Nodes(a), Self::Nodes(b)) => Some(Self::Nodes([a.as_slice(), b].concat())),
            _ => None,
        }
    }

    /// No node, one, or two if there are too many children for one.
    pub(super) fn into_nodes(mut self) -> [Option<Arc<TreeNode<T>>>; 2] {
        let second = (self.len() > MAX_CHILDREN).then(|| match &mut self {
            Self::Objects(objects) => Self::Objects(objects.split_off(objects.len() / 2)),
            Self::Nodes(nodes) => Self::Nodes(nodes.split_off(nodes.len() / 2)),
        });
        [TreeNode::new(self), second.and_then(TreeNode::new)]
    }
}

/// The position of an object in a leaf, or where to insert it.
pub(super) fn find<T, Q>(objects: &[Arc<T>], key: &Q) -> Result<usize, usize>
where
    T: Keyed,
    T::Key: Borrow<Q>,
    Q: Ord + ?Sized,
{
    objects.binary_search_by(|it| it.key().borrow().cmp(key))
}

/// The child that contains an object, or into which to insert it.
pub(super) fn child<T, Q>(nodes: &[Arc<TreeNode<T>>], key: &Q) -> usize
where
    T: Keyed,
    T::Key: Borrow<Q>,
    Q: Ord + ?Sized,
{
    nodes.partition_point(|it| it.least.borrow() <= key).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ServiceName,
        state::{Service, ServiceState},
    };

    type Services = Children<ServiceState>;

    fn services(count: usize) -> Services {
        let state =
            |number| ServiceState::new(Service::new(ServiceName::new("ns", format!("s{number:05}"))), []);
        Children::Objects((0..count).map(|it| Arc::new(state(it))).collect())
    }

    fn nodes(count: usize) -> Services {
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
        let size = |it: Option<Services>| it.map(|it| it.len());
        assert_eq!(size(services(2).join(&services(3))), Some(5));
        assert_eq!(size(nodes(2).join(&nodes(3))), Some(5));
        assert_eq!(size(nodes(2).join(&services(3))), None);
    }
}
