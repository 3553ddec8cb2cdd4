//! A position in a tree, from which it is read in order.

use std::sync::Arc;

use crate::{ServiceName, state::ServiceState};

use super::tree::{Children, Tree, TreeNode};

/// What remains to be read, the next item last.
#[derive(Clone, Debug, Default)]
pub(super) struct Cursor<'a>(Vec<CursorItem<'a>>);

/// A subtree or a Service.
#[derive(Clone, Copy, Debug)]
pub(super) enum CursorItem<'a> {
    Node(&'a Arc<TreeNode>),
    Service(&'a Arc<ServiceState>),
}

impl<'a> Cursor<'a> {
    pub(super) fn new(tree: &'a Tree) -> Self {
        Self(tree.root.iter().map(CursorItem::Node).collect())
    }

    /// The next item.
    pub(super) fn peek(&self) -> Option<CursorItem<'a>> {
        self.0.last().copied()
    }

    /// Skips the next item.
    pub(super) fn skip(&mut self) {
        self.0.pop();
    }

    /// Replaces a subtree, which is the next item, by its children.
    pub(super) fn enter(&mut self, node: &'a TreeNode) {
        self.0.pop();
        match &node.children {
            Children::Services(states) => self.0.extend(states.iter().rev().map(CursorItem::Service)),
            Children::Nodes(nodes) => self.0.extend(nodes.iter().rev().map(CursorItem::Node)),
        }
    }
}

impl<'a> CursorItem<'a> {
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
