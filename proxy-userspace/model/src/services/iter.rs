//! Reads a map in the order of the names.

use std::sync::Arc;

use crate::{ServiceName, state::ServiceState};

use super::tree::{Children, Tree, TreeNode};

/// Iterates over a map in the order of the names: what remains to be read, the next item last.
#[derive(Clone, Debug)]
pub struct Iter<'a>(Vec<Entry<'a>>);

/// A subtree or a Service.
#[derive(Clone, Copy, Debug)]
pub(super) enum Entry<'a> {
    Node(&'a Arc<TreeNode>),
    Service(&'a Arc<ServiceState>),
}

impl<'a> Iter<'a> {
    pub(super) fn new(tree: &'a Tree) -> Self {
        Self(tree.root.iter().map(Entry::Node).collect())
    }

    /// The next item.
    pub(super) fn peek(&self) -> Option<Entry<'a>> {
        self.0.last().copied()
    }

    /// Skips the next item.
    pub(super) fn pop(&mut self) {
        self.0.pop();
    }

    /// Replaces a subtree, which is the next item, by its children.
    pub(super) fn enter(&mut self, node: &'a TreeNode) {
        self.0.pop();
        match &node.children {
            Children::Services(states) => self.0.extend(states.iter().rev().map(Entry::Service)),
            Children::Nodes(nodes) => self.0.extend(nodes.iter().rev().map(Entry::Node)),
        }
    }
}

impl<'a> Iterator for Iter<'a> {
    type Item = (&'a ServiceName, &'a Arc<ServiceState>);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.peek()? {
                Entry::Node(node) => self.enter(node),
                Entry::Service(state) => {
                    self.pop();
                    return Some((&state.service.name, state));
                }
            }
        }
    }
}

impl<'a> Entry<'a> {
    /// No name in here comes before this one.
    pub(super) fn least(self) -> &'a ServiceName {
        match self {
            Self::Node(node) => &node.least,
            Self::Service(state) => &state.service.name,
        }
    }

    /// Whether both are the same object in memory.
    pub(super) fn is_same(self, other: Self) -> bool {
        match (self, other) {
            (Self::Node(a), Self::Node(b)) => Arc::ptr_eq(a, b),
            (Self::Service(a), Self::Service(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}
