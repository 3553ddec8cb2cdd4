//! All Services of a map, in order.

use std::{slice, sync::Arc};

use crate::{ServiceName, state::ServiceState};

use super::tree::{Kids, Node};

/// Goes through a map in the order of the names.
#[derive(Clone, Debug)]
pub struct Iter<'a> {
    /// What is left of the branches on the way to the leaf.
    branches: Vec<slice::Iter<'a, Arc<Node>>>,
    leaf: slice::Iter<'a, Arc<ServiceState>>,
    left: usize,
}

impl<'a> Iter<'a> {
    pub(super) fn new(root: Option<&'a Arc<Node>>, len: usize) -> Self {
        let mut iter = Self { branches: Vec::new(), leaf: [].iter(), left: len };
        if let Some(root) = root {
            iter.enter(root);
        }
        iter
    }

    fn enter(&mut self, node: &'a Node) {
        match &node.kids {
            Kids::Services(states) => self.leaf = states.iter(),
            Kids::Nodes(nodes) => self.branches.push(nodes.iter()),
        }
    }
}

impl<'a> Iterator for Iter<'a> {
    type Item = (&'a ServiceName, &'a Arc<ServiceState>);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(state) = self.leaf.next() {
                self.left -= 1;
                return Some((&state.service.name, state));
            }
            match self.branches.last_mut()?.next() {
                Some(node) => self.enter(node),
                None => drop(self.branches.pop()),
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Iter<'_> {}
