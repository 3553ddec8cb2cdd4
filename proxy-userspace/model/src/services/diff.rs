//! What differs between two maps.

use std::{cmp::Ordering, sync::Arc};

use crate::{ServiceName, state::ServiceState};

use super::tree::{Kids, Node};

/// Goes through what differs between two maps, in the order of the names: name, before, after.
#[derive(Debug)]
pub struct Diff<'a> {
    before: Cursor<'a>,
    after: Cursor<'a>,
    /// Whether copies of the same value differ.
    by_pointer: bool,
}

/// What is still to be looked at, the next at the end.
type Cursor<'a> = Vec<Item<'a>>;

#[derive(Clone, Copy, Debug)]
enum Item<'a> {
    Node(&'a Arc<Node>),
    Service(&'a Arc<ServiceState>),
}

impl<'a> Item<'a> {
    /// The name that nothing in here comes before.
    fn least(self) -> &'a ServiceName {
        match self {
            Self::Node(node) => &node.least,
            Self::Service(state) => &state.service.name,
        }
    }

    /// Whether both are one in memory.
    fn is(self, other: Self) -> bool {
        match (self, other) {
            (Self::Node(a), Self::Node(b)) => Arc::ptr_eq(a, b),
            (Self::Service(a), Self::Service(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

impl<'a> Diff<'a> {
    pub(super) fn new(before: Option<&'a Arc<Node>>, after: Option<&'a Arc<Node>>) -> Self {
        let cursor = |root: Option<&'a Arc<Node>>| root.map(Item::Node).into_iter().collect();
        Self { before: cursor(before), after: cursor(after), by_pointer: false }
    }

    /// Copies of the same value differ as well.
    pub(super) fn of_pointers(before: Option<&'a Arc<Node>>, after: Option<&'a Arc<Node>>) -> Self {
        Self { by_pointer: true, ..Self::new(before, after) }
    }
}

/// Puts what is in the next node in its place.
fn open(cursor: &mut Cursor<'_>) {
    if let Some(Item::Node(node)) = cursor.last().copied() {
        cursor.pop();
        match &node.kids {
            Kids::Services(states) => cursor.extend(states.iter().rev().map(Item::Service)),
            Kids::Nodes(nodes) => cursor.extend(nodes.iter().rev().map(Item::Node)),
        }
    }
}

impl<'a> Iterator for Diff<'a> {
    type Item = (&'a ServiceName, Option<&'a Arc<ServiceState>>, Option<&'a Arc<ServiceState>>);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let (before, after) = (self.before.last().copied(), self.after.last().copied());
            // Most of what is next to a change is shared: its names are not even looked at.
            if let (Some(old), Some(new)) = (before, after)
                && old.is(new)
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
                // What begins first is looked into first, or there is nothing like it on the other side.
                (Some(Item::Node(_)), _, Ordering::Less) => open(&mut self.before),
                (_, Some(Item::Node(_)), Ordering::Greater) => open(&mut self.after),
                (Some(Item::Service(old)), _, Ordering::Less) => {
                    self.before.pop();
                    return Some((&old.service.name, Some(old), None));
                }
                (_, Some(Item::Service(new)), Ordering::Greater) => {
                    self.after.pop();
                    return Some((&new.service.name, None, Some(new)));
                }
                (Some(Item::Node(old)), Some(Item::Node(new)), _) => {
                    // The taller one may have the other inside it.
                    let (old, new) = (height(old), height(new));
                    if old >= new {
                        open(&mut self.before);
                    }
                    if new >= old {
                        open(&mut self.after);
                    }
                }
                (Some(Item::Node(_)), _, _) => open(&mut self.before),
                (_, Some(Item::Node(_)), _) => open(&mut self.after),
                (Some(Item::Service(old)), Some(Item::Service(new)), _) => {
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

/// How many levels are below.
fn height(mut node: &Node) -> usize {
    let mut height = 0;
    while let Kids::Nodes(nodes) = &node.kids
        && let Some(first) = nodes.first()
    {
        node = first;
        height += 1;
    }
    height
}
