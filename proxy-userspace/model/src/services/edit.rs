//! One change, made to one map or to many.

use std::{collections::HashMap, sync::Arc};

use crate::{ServiceName, state::ServiceState};

use super::{
    Services,
    tree::{FEWEST, Kids, MOST, Node, child, find},
};

/// A change of one Service, to be made to any number of maps: what they share before it, they share after it.
#[derive(Debug)]
pub struct Edit {
    name: ServiceName,
    state: Option<Arc<ServiceState>>,
    /// Whether another copy of the same value is put in the old one's place.
    replaces_equal: bool,
    /// What became of the nodes met so far; each is kept alive, so that its address stays its own.
    done: HashMap<usize, (Arc<Node>, After)>,
}

/// What became of a node.
#[derive(Clone, Debug)]
struct After {
    nodes: [Option<Arc<Node>>; 2],
    change: Change,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Nothing,
    Added,
    Replaced,
    Removed,
}

impl Edit {
    /// Adds a Service, or puts it in the place of the one of the same name, unless that one is of the same value.
    pub fn set(state: Arc<ServiceState>) -> Self {
        let name = state.service.name.clone();
        Self { name, state: Some(state), replaces_equal: false, done: HashMap::new() }
    }

    /// Takes a Service away.
    pub fn delete(name: ServiceName) -> Self {
        Self { name, state: None, replaces_equal: false, done: HashMap::new() }
    }

    /// Puts a Service in the place of one of the same value.
    pub(super) fn replace(state: Arc<ServiceState>) -> Self {
        Self { replaces_equal: true, ..Self::set(state) }
    }

    /// The Service as it is after the change.
    pub fn state(&self) -> Option<&Arc<ServiceState>> {
        self.state.as_ref()
    }

    /// Makes the change; false if the map says so already, and is left as it is.
    pub fn apply(&mut self, services: &mut Services) -> bool {
        let Some(root) = &services.root else {
            let Some(state) = &self.state else { return false };
            *services = std::iter::once(Arc::clone(state)).collect();
            return true;
        };
        let After { nodes, change } = self.node(root);
        match change {
            Change::Nothing => return false,
            Change::Added => services.len += 1,
            Change::Removed => services.len -= 1,
            Change::Replaced => {}
        }
        services.root = match nodes {
            [Some(a), Some(b)] => Node::new(Kids::Nodes(vec![a, b])),
            [first, second] => first.or(second).map(collapse),
        };
        true
    }

    fn node(&mut self, node: &Arc<Node>) -> After {
        let address = Arc::as_ptr(node).addr();
        if let Some((_, after)) = self.done.get(&address) {
            return after.clone();
        }
        let unchanged = || After { nodes: [Some(Arc::clone(node)), None], change: Change::Nothing };
        let after = match &node.kids {
            Kids::Services(states) => match self.leaf(states) {
                Some((states, change)) => After { nodes: Kids::Services(states).into_nodes(), change },
                None => unchanged(),
            },
            Kids::Nodes(nodes) => {
                let at = child(nodes, &self.name);
                match nodes.get(at).map(|it| self.node(it)) {
                    None | Some(After { change: Change::Nothing, .. }) => unchanged(),
                    Some(after) => After {
                        nodes: Kids::Nodes(branch(nodes, at, after.nodes)).into_nodes(),
                        change: after.change,
                    },
                }
            }
        };
        self.done.insert(address, (Arc::clone(node), after.clone()));
        after
    }

    /// The leaf after the change, if it changes.
    fn leaf(&self, states: &[Arc<ServiceState>]) -> Option<(Vec<Arc<ServiceState>>, Change)> {
        let (at, old) = match find(states, &self.name) {
            Ok(at) => (at, states.get(at)),
            Err(at) => (at, None),
        };
        let (before, after) = (&states[..at], &states[at + usize::from(old.is_some())..]);
        let change = match (old, &self.state) {
            (None, None) => return None,
            (Some(old), Some(new)) if Arc::ptr_eq(old, new) || (!self.replaces_equal && old == new) => {
                return None;
            }
            (None, Some(_)) => Change::Added,
            (Some(_), Some(_)) => Change::Replaced,
            (Some(_), None) => Change::Removed,
        };
        Some((before.iter().chain(&self.state).chain(after).cloned().collect(), change))
    }
}

/// The children, with the one at `at` replaced by what became of it.
fn branch(nodes: &[Arc<Node>], at: usize, now: [Option<Arc<Node>>; 2]) -> Vec<Arc<Node>> {
    let mut found = Vec::with_capacity(nodes.len() + 1);
    found.extend(nodes[..at].iter().cloned());
    found.extend(now.into_iter().flatten());
    found.extend(nodes[at + 1..].iter().cloned());
    join_small(&mut found, at);
    found
}

/// Joins a node that has become small with a neighbour: many deletes leave no crumbs.
fn join_small(nodes: &mut Vec<Arc<Node>>, at: usize) {
    if nodes.get(at).is_none_or(|it| it.kids.len() >= FEWEST) {
        return;
    }
    let first = if at + 1 < nodes.len() { at } else { at.saturating_sub(1) };
    let [a, b, ..] = &nodes[first..] else { return };
    if a.kids.len() + b.kids.len() > MOST {
        return;
    }
    if let Some(joined) = a.kids.join(&b.kids).and_then(Node::new) {
        nodes.splice(first..first + 2, [joined]);
    }
}

/// A root with one child is no more than the child.
fn collapse(mut root: Arc<Node>) -> Arc<Node> {
    while let Kids::Nodes(nodes) = &root.kids
        && let [only] = nodes.as_slice()
    {
        root = Arc::clone(only);
    }
    root
}
