//! The difference between two maps.

use std::{cmp::Ordering, sync::Arc};

use crate::{ServiceName, state::ServiceState};

use super::{
    iter::{Entry, Iter},
    tree::{Children, Tree, TreeNode},
};

/// Iterates over the differences between two maps, in the order of the names: name, before, after.
#[derive(Debug)]
pub struct Diff<'a> {
    before: Iter<'a>,
    after: Iter<'a>,
    /// Whether equal Services differ if they are not the same object.
    by_pointer: bool,
}

impl<'a> Diff<'a> {
    pub(super) fn new(before: &'a Tree, after: &'a Tree) -> Self {
        Self { before: Iter::new(before), after: Iter::new(after), by_pointer: false }
    }

    /// Equal Services that are not the same object differ as well.
    pub(super) fn of_pointers(before: &'a Tree, after: &'a Tree) -> Self {
        Self { by_pointer: true, ..Self::new(before, after) }
    }
}

impl<'a> Iterator for Diff<'a> {
    type Item = (&'a ServiceName, Option<&'a Arc<ServiceState>>, Option<&'a Arc<ServiceState>>);

    fn next(&mut self) -> Option<Self::Item> {
        use Entry::{Node, Service};
        loop {
            let (before, after) = (self.before.peek(), self.after.peek());
            // Most of what surrounds a change is shared: its names are not compared.
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
                (Some(Service(old)), _, Ordering::Less) => {
                    self.before.pop();
                    return Some((&old.service.name, Some(old), None));
                }
                (_, Some(Service(new)), Ordering::Greater) => {
                    self.after.pop();
                    return Some((&new.service.name, None, Some(new)));
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
                (Some(Service(old)), Some(Service(new)), _) => {
                    self.before.pop();
                    self.after.pop();
                    if self.by_pointer || old != new {
                        return Some((&new.service.name, Some(old), Some(new)));
                    }
                }
                (None, _, _) | (_, None, _) => return None,
            }
        }
    }
}

/// The number of levels below a node.
fn height(mut node: &TreeNode) -> usize {
    let mut height = 0;
    while let Children::Nodes(nodes) = &node.children
        && let Some(first) = nodes.first()
    {
        node = first;
        height += 1;
    }
    height
}
