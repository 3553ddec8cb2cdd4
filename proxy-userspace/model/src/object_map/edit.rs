//! One change, applied to one map or to many.

use std::{collections::HashMap, sync::Arc};

use super::tree::{Children, Keyed, MAX_CHILDREN, MIN_CHILDREN, TreeNode, child, find};

/// A change of one object that can be applied to any number of maps: what they share before it, they share after it.
pub struct Edit<T: Keyed> {
    key: T::Key,
    object: Option<Arc<T>>,
    /// Whether to replace an equal object as well.
    replaces_equal: bool,
    /// The results for the nodes visited so far, by address. Each node is kept alive, so that no other one gets its
    /// address.
    results: HashMap<usize, (Arc<TreeNode<T>>, Edited<T>)>,
}

/// What a node is replaced with.
struct Edited<T: Keyed> {
    nodes: [Option<Arc<TreeNode<T>>>; 2],
    outcome: Outcome,
}

impl<T: Keyed> Clone for Edited<T> {
    fn clone(&self) -> Self {
        Self { nodes: self.nodes.clone(), outcome: self.outcome }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Unchanged,
    Added,
    Replaced,
    Removed,
}

impl<T: Keyed + PartialEq> Edit<T> {
    /// Adds an object or replaces the one of the same key; a map that has an equal one is not changed.
    pub fn set(object: Arc<T>) -> Self {
        let key = object.key().clone();
        Self { key, object: Some(object), replaces_equal: false, results: HashMap::new() }
    }

    pub fn delete(key: T::Key) -> Self {
        Self { key, object: None, replaces_equal: false, results: HashMap::new() }
    }

    /// Replaces an object by an equal one.
    pub(super) fn replace(object: Arc<T>) -> Self {
        Self { replaces_equal: true, ..Self::set(object) }
    }

    /// The object after the change.
    pub fn object(&self) -> Option<&Arc<T>> {
        self.object.as_ref()
    }

    /// Changes a tree and the number of its objects; false if there is nothing to change.
    pub(super) fn apply(&mut self, root: &mut Option<Arc<TreeNode<T>>>, len: &mut usize) -> bool {
        let Some(node) = root else {
            *root = TreeNode::tree_of(self.object.as_slice());
            *len = usize::from(root.is_some());
            return root.is_some();
        };
        let Edited { nodes, outcome } = self.node(node);
        match outcome {
            Outcome::Unchanged => return false,
            Outcome::Added => *len += 1,
            Outcome::Removed => *len -= 1,
            Outcome::Replaced => {}
        }
        *root = match nodes {
            [Some(a), Some(b)] => TreeNode::new(Children::Nodes(vec![a, b])),
            [first, second] => first.or(second).map(collapse),
        };
        true
    }

    fn node(&mut self, node: &Arc<TreeNode<T>>) -> Edited<T> {
        let address = Arc::as_ptr(node).addr();
        if let Some((_, edited)) = self.results.get(&address) {
            return edited.clone();
        }
        let edited = match &node.children {
            Children::Objects(objects) => self.leaf(objects),
            Children::Nodes(nodes) => self.branch(nodes),
        };
        let edited = edited.map_or_else(
            || Edited { nodes: [Some(Arc::clone(node)), None], outcome: Outcome::Unchanged },
            |(children, outcome)| Edited { nodes: children.into_nodes(), outcome },
        );
        self.results.insert(address, (Arc::clone(node), edited.clone()));
        edited
    }

    /// The children of a leaf after the change, if it changes.
    fn leaf(&self, objects: &[Arc<T>]) -> Option<(Children<T>, Outcome)> {
        let (at, old) = match find(objects, &self.key) {
            Ok(at) => (at, objects.get(at)),
            Err(at) => (at, None),
        };
        let outcome = match (old, &self.object) {
            (None, None) => return None,
            (Some(old), Some(new)) if Arc::ptr_eq(old, new) || (!self.replaces_equal && old == new) => {
                return None;
            }
            (None, Some(_)) => Outcome::Added,
            (Some(_), Some(_)) => Outcome::Replaced,
            (Some(_), None) => Outcome::Removed,
        };
        let (before, after) = (&objects[..at], &objects[at + usize::from(old.is_some())..]);
        let objects = before.iter().chain(&self.object).chain(after).cloned().collect();
        Some((Children::Objects(objects), outcome))
    }

    /// The children of a branch after the change, if it changes.
    fn branch(&mut self, nodes: &[Arc<TreeNode<T>>]) -> Option<(Children<T>, Outcome)> {
        let at = child(nodes, &self.key);
        let Edited { nodes: replacement, outcome } = self.node(nodes.get(at)?);
        if outcome == Outcome::Unchanged {
            return None;
        }
        let mut edited = Vec::with_capacity(nodes.len() + 1);
        edited.extend(nodes[..at].iter().cloned());
        edited.extend(replacement.into_iter().flatten());
        edited.extend(nodes[at + 1..].iter().cloned());
        merge_small(&mut edited, at);
        Some((Children::Nodes(edited), outcome))
    }
}

/// Merges a node that has become small with a neighbor, so that many deletions leave no tiny nodes.
fn merge_small<T: Keyed>(nodes: &mut Vec<Arc<TreeNode<T>>>, at: usize) {
    if nodes.get(at).is_none_or(|it| it.children.len() >= MIN_CHILDREN) {
        return;
    }
    let first = if at + 1 < nodes.len() { at } else { at.saturating_sub(1) };
    let [a, b, ..] = &nodes[first..] else { return };
    if a.children.len() + b.children.len() > MAX_CHILDREN {
        return;
    }
    if let Some(merged) = a.children.join(&b.children).and_then(TreeNode::new) {
        nodes.splice(first..first + 2, [merged]);
    }
}

/// Replaces a root that has one child by this child.
fn collapse<T: Keyed>(mut root: Arc<TreeNode<T>>) -> Arc<TreeNode<T>> {
    while let Children::Nodes(nodes) = &root.children
        && let [only] = nodes.as_slice()
    {
        root = Arc::clone(only);
    }
    root
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ServiceName,
        state::{Service, ServiceState},
    };

    /// Leaves with so many Services each, of which the one at `at` has become smaller: what they are afterwards.
    #[track_caller]
    fn check(sizes: &[usize], at: usize, expect: &[usize]) {
        let mut names = (0..).map(|it| ServiceName::new("ns", format!("s{it:05}")));
        let state = |name| Arc::new(ServiceState::new(Service::new(name), []));
        let leaf =
            |size: &usize| TreeNode::new(Children::Objects(names.by_ref().take(*size).map(state).collect()));
        let mut nodes: Vec<_> = sizes.iter().filter_map(leaf).collect();
        merge_small(&mut nodes, at);
        assert_eq!(nodes.iter().map(|it| it.children.len()).collect::<Vec<_>>(), expect, "{sizes:?} at {at}");
    }

    #[test]
    fn a_small_node_is_merged_with_the_next_one_or_the_last_with_the_one_before_if_both_fit() {
        check(&[20, 7, 20], 1, &[20, 27]);
        check(&[20, 7], 1, &[27]);
        check(&[7, 25], 0, &[32]);
        check(&[1, 1, 1], 0, &[2, 1]);
        // What is large enough or does not fit stays.
        check(&[8, 8], 0, &[8, 8]);
        check(&[7, 26], 0, &[7, 26]);
        check(&[5, 7, 30], 1, &[5, 7, 30]);
        check(&[7], 0, &[7]);
        check(&[7], 1, &[7]);
    }
}
