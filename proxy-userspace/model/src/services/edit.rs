//! One change, applied to one map or to many.

use std::{collections::HashMap, sync::Arc};

use crate::{ServiceName, state::ServiceState};

use super::tree::{Children, MAX_CHILDREN, MIN_CHILDREN, Tree, TreeNode, child, find};

/// A change of one Service that can be applied to any number of maps: what they share before it, they share after it.
#[derive(Debug)]
pub struct Edit {
    name: ServiceName,
    state: Option<Arc<ServiceState>>,
    /// Whether to replace an equal Service as well.
    replaces_equal: bool,
    /// The results for the nodes visited so far, by address. Each node is kept alive, so that no other one gets its
    /// address.
    results: HashMap<usize, (Arc<TreeNode>, Edited)>,
}

/// What a node is replaced with.
#[derive(Clone, Debug)]
struct Edited {
    nodes: [Option<Arc<TreeNode>>; 2],
    outcome: Outcome,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Unchanged,
    Added,
    Replaced,
    Removed,
}

impl Edit {
    /// Adds a Service or replaces the one of the same name; a map that has an equal one is not changed.
    pub fn set(state: Arc<ServiceState>) -> Self {
        let name = state.service.name.clone();
        Self { name, state: Some(state), replaces_equal: false, results: HashMap::new() }
    }

    /// Removes a Service.
    pub fn delete(name: ServiceName) -> Self {
        Self { name, state: None, replaces_equal: false, results: HashMap::new() }
    }

    /// Replaces a Service by an equal one.
    pub(super) fn replace(state: Arc<ServiceState>) -> Self {
        Self { replaces_equal: true, ..Self::set(state) }
    }

    /// The Service after the change.
    pub fn state(&self) -> Option<&Arc<ServiceState>> {
        self.state.as_ref()
    }

    /// Changes a tree; false if there is nothing to change.
    pub(super) fn apply(&mut self, tree: &mut Tree) -> bool {
        let Some(root) = &tree.root else {
            *tree = Tree::build(self.state.as_slice());
            return tree.len > 0;
        };
        let Edited { nodes, outcome } = self.node(root);
        match outcome {
            Outcome::Unchanged => return false,
            Outcome::Added => tree.len += 1,
            Outcome::Removed => tree.len -= 1,
            Outcome::Replaced => {}
        }
        tree.root = match nodes {
            [Some(a), Some(b)] => TreeNode::new(Children::Nodes(vec![a, b])),
            [first, second] => first.or(second).map(collapse),
        };
        true
    }

    fn node(&mut self, node: &Arc<TreeNode>) -> Edited {
        let address = Arc::as_ptr(node).addr();
        if let Some((_, edited)) = self.results.get(&address) {
            return edited.clone();
        }
        let edited = match &node.children {
            Children::Services(states) => self.leaf(states),
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
    fn leaf(&self, states: &[Arc<ServiceState>]) -> Option<(Children, Outcome)> {
        let (at, old) = match find(states, &self.name) {
            Ok(at) => (at, states.get(at)),
            Err(at) => (at, None),
        };
        let outcome = match (old, &self.state) {
            (None, None) => return None,
            (Some(old), Some(new)) if Arc::ptr_eq(old, new) || (!self.replaces_equal && old == new) => {
                return None;
            }
            (None, Some(_)) => Outcome::Added,
            (Some(_), Some(_)) => Outcome::Replaced,
            (Some(_), None) => Outcome::Removed,
        };
        let (before, after) = (&states[..at], &states[at + usize::from(old.is_some())..]);
        let states = before.iter().chain(&self.state).chain(after).cloned().collect();
        Some((Children::Services(states), outcome))
    }

    /// The children of a branch after the change, if it changes.
    fn branch(&mut self, nodes: &[Arc<TreeNode>]) -> Option<(Children, Outcome)> {
        let at = child(nodes, &self.name);
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

/// Merges a node that has become small with a neighbour, so that many deletions leave no tiny nodes.
fn merge_small(nodes: &mut Vec<Arc<TreeNode>>, at: usize) {
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
fn collapse(mut root: Arc<TreeNode>) -> Arc<TreeNode> {
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
    use crate::state::Service;

    /// Leaves with so many Services each, of which the one at `at` has become smaller: what they are afterwards.
    #[track_caller]
    fn check(sizes: &[usize], at: usize, expect: &[usize]) {
        let mut names = (0..).map(|it| ServiceName::new("ns", format!("s{it:05}")));
        let state = |name| Arc::new(ServiceState::new(Service::new(name), []));
        let leaf =
            |size: &usize| TreeNode::new(Children::Services(names.by_ref().take(*size).map(state).collect()));
        let mut nodes: Vec<_> = sizes.iter().filter_map(leaf).collect();
        merge_small(&mut nodes, at);
        assert_eq!(nodes.iter().map(|it| it.children.len()).collect::<Vec<_>>(), expect, "{sizes:?} at {at}");
    }

    #[test]
    fn a_small_node_is_merged_with_the_next_one_or_the_last_with_the_one_before() {
        check(&[20, 7, 20], 1, &[20, 27]);
        check(&[20, 7], 1, &[27]);
        check(&[7, 25], 0, &[32]);
        check(&[1, 1, 1], 0, &[2, 1]);
    }

    #[test]
    fn what_is_large_enough_or_does_not_fit_stays() {
        check(&[8, 8], 0, &[8, 8]);
        check(&[7, 26], 0, &[7, 26]);
        check(&[5, 7, 30], 1, &[5, 7, 30]);
        check(&[7], 0, &[7]);
        check(&[7], 1, &[7]);
    }
}
