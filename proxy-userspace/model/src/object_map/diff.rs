//! The difference between two maps.

use std::{cmp::Ordering, sync::Arc};

use super::{
    iter::{Entry, Iter},
    tree::{Children, Keyed, TreeNode},
};

/// Iterates over the differences between two maps, in the order of the keys: key, before, after.
pub struct Diff<'a, T: Keyed> {
    before: Iter<'a, T>,
    after: Iter<'a, T>,
    /// Whether equal objects differ if they are not the same object.
    by_pointer: bool,
}

impl<'a, T: Keyed> Diff<'a, T> {
    pub(super) fn new(before: Iter<'a, T>, after: Iter<'a, T>) -> Self {
        Self { before, after, by_pointer: false }
    }

    /// Equal objects that are not the same object differ as well.
    pub(super) fn of_pointers(before: Iter<'a, T>, after: Iter<'a, T>) -> Self {
        Self { by_pointer: true, ..Self::new(before, after) }
    }
}

impl<'a, T: Keyed + PartialEq> Iterator for Diff<'a, T> {
    type Item = (&'a T::Key, Option<&'a Arc<T>>, Option<&'a Arc<T>>);

    fn next(&mut self) -> Option<Self::Item> {
        use Entry::{Node, Object};
        loop {
            let (before, after) = (self.before.peek(), self.after.peek());
            // Most of what surrounds a change is shared: its keys are not compared.
            if let (Some(old), Some(new)) = (before, after)
                && old.is_same(new)
            {
                self.before.pop();
                self.after.pop();
                continue;
            }
            let order = match (before, after) {
                (None, None) => return None,
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some(before), Some(after)) => before.least().cmp(after.least()),
            };
            match (before, after, order) {
                // The subtree that begins first is entered first: the other side may have nothing in its range.
                (Some(Node(node)), _, Ordering::Less) => self.before.enter(node),
                (_, Some(Node(node)), Ordering::Greater) => self.after.enter(node),
                (Some(Object(old)), _, Ordering::Less) => {
                    self.before.pop();
                    return Some((old.key(), Some(old), None));
                }
                (_, Some(Object(new)), Ordering::Greater) => {
                    self.after.pop();
                    return Some((new.key(), None, Some(new)));
                }
                (Some(Node(old)), Some(Node(new)), _) => {
                    // The higher one may contain the other.
                    let heights = height(old).cmp(&height(new));
                    if heights.is_ge() {
                        self.before.enter(old);
                    }
                    if heights.is_le() {
                        self.after.enter(new);
                    }
                }
                (Some(Node(node)), _, _) => self.before.enter(node),
                (_, Some(Node(node)), _) => self.after.enter(node),
                (Some(Object(old)), Some(Object(new)), _) => {
                    self.before.pop();
                    self.after.pop();
                    if self.by_pointer || old != new {
                        return Some((new.key(), Some(old), Some(new)));
                    }
                }
                (None, _, _) | (_, None, _) => return None,
            }
        }
    }
}

/// The number of levels below a node.
fn height<T: Keyed>(mut node: &TreeNode<T>) -> usize {
    let mut height = 0;
    while let Children::Nodes(nodes) = &node.children
        && let Some(first) = nodes.first()
    {
        node = first;
        height += 1;
    }
    height
}
