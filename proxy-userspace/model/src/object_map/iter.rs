//! Reads a map in the order of the keys.

use std::sync::Arc;

use super::tree::{Children, Keyed, TreeNode};

/// Iterates over a map in the order of the keys: what remains to be read, the next item last.
pub struct Iter<'a, T: Keyed>(Vec<Entry<'a, T>>);

pub(super) enum Entry<'a, T: Keyed> {
    Node(&'a Arc<TreeNode<T>>),
    Object(&'a Arc<T>),
}

impl<T: Keyed> Clone for Iter<'_, T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: Keyed> Clone for Entry<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Keyed> Copy for Entry<'_, T> {}

impl<'a, T: Keyed> Iter<'a, T> {
    pub(super) fn new(root: Option<&'a Arc<TreeNode<T>>>) -> Self {
        Self(root.into_iter().map(Entry::Node).collect())
    }

    pub(super) fn peek(&self) -> Option<Entry<'a, T>> {
        self.0.last().copied()
    }

    pub(super) fn pop(&mut self) {
        self.0.pop();
    }

    /// Replaces a subtree, which is the next item, by its children.
    pub(super) fn enter(&mut self, node: &'a TreeNode<T>) {
        self.0.pop();
        match &node.children {
            Children::Objects(objects) => self.0.extend(objects.iter().rev().map(Entry::Object)),
            Children::Nodes(nodes) => self.0.extend(nodes.iter().rev().map(Entry::Node)),
        }
    }
}

impl<'a, T: Keyed> Iterator for Iter<'a, T> {
    type Item = (&'a T::Key, &'a Arc<T>);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.peek()? {
                Entry::Node(node) => self.enter(node),
                Entry::Object(object) => {
                    self.pop();
                    return Some((object.key(), object));
                }
            }
        }
    }
}

impl<'a, T: Keyed> Entry<'a, T> {
    /// No key in here comes before this one.
    pub(super) fn least(self) -> &'a T::Key {
        match self {
            Self::Node(node) => &node.least,
            Self::Object(object) => object.key(),
        }
    }

    /// Whether both are the same object in memory.
    pub(super) fn is_same(self, other: Self) -> bool {
        match (self, other) {
            (Self::Node(a), Self::Node(b)) => Arc::ptr_eq(a, b),
            (Self::Object(a), Self::Object(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}
