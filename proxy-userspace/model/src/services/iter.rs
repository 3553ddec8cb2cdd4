//! The Services of a map, in order.

use std::sync::Arc;

use crate::{ServiceName, state::ServiceState};

use super::{
    cursor::{Cursor, CursorItem},
    tree::Tree,
};

/// Iterates over a map in the order of the names.
#[derive(Clone, Debug)]
pub struct Iter<'a> {
    cursor: Cursor<'a>,
    remaining: usize,
}

impl<'a> Iter<'a> {
    pub(super) fn new(tree: &'a Tree) -> Self {
        Self { cursor: Cursor::new(tree), remaining: tree.len }
    }
}

impl<'a> Iterator for Iter<'a> {
    type Item = (&'a ServiceName, &'a Arc<ServiceState>);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.cursor.peek()? {
                CursorItem::Node(node) => self.cursor.enter(node),
                CursorItem::Service(state) => {
                    self.cursor.skip();
                    self.remaining -= 1;
                    return Some((&state.service.name, state));
                }
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining, Some(self.remaining))
    }
}

impl ExactSizeIterator for Iter<'_> {}
