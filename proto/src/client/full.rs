//! The full state on every change.
//!
//! The one rule: a state is handed out whole, and only if it differs from the one before.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    Client,
    changes::{ChangeWatch, NodeChange},
};
use crate::localv1::{Endpoint, Extension, Node, Revision, Service};

/// All that one node serves.
///
/// What did not change is shared with the state before: pointers that are equal are values that are equal.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// What tells it from other states, if the brain says so: KPNG's does not.
    pub revision: Option<Revision>,
    /// What the brain says beyond KPNG's API, of what the client wanted: what is not among them is not said.
    pub extensions: Vec<Extension>,
    /// The nodes of the cluster, by name; none if the brain does not say.
    pub nodes: BTreeMap<Arc<str>, Arc<Node>>,
    /// The Services, by `namespace/name`.
    pub services: BTreeMap<Arc<str>, Arc<ServiceEndpoints>>,
}

/// A Service and the endpoints that the node may use for it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceEndpoints {
    /// The Service.
    pub service: Service,
    /// The endpoints by what they are called within the Service: the pod's name, or an opaque word.
    pub endpoints: BTreeMap<Arc<str>, Arc<Endpoint>>,
}

/// Follows the full state of a node: what [`Client::watch`] returns.
#[derive(Debug)]
pub struct Watch {
    changes: ChangeWatch,
    last: Arc<State>,
}

impl Watch {
    pub(super) fn new(client: &Client) -> Self {
        Self { changes: ChangeWatch::new(client), last: Arc::default() }
    }

    /// Waits for a state that differs from the one before: the newest one. Several changes while nobody waits are one.
    ///
    /// It costs what changed, if nobody holds the state before any more; else a copy of its maps.
    ///
    /// It is never `None`: no error and no outage is the end. Nothing is lost if it is dropped while it waits.
    pub async fn next(&mut self) -> Option<Arc<State>> {
        let change = self.changes.next().await?;
        Arc::make_mut(&mut self.last).apply(change);
        Some(Arc::clone(&self.last))
    }
}

impl State {
    /// Becomes the state that `change` leads to.
    pub fn apply(&mut self, change: NodeChange) {
        let NodeChange { revision, extensions, nodes, services } = change;
        (self.revision, self.extensions) = (revision, extensions);
        edit(&mut self.nodes, nodes);
        edit(&mut self.services, services);
    }
}

fn edit<T>(values: &mut BTreeMap<Arc<str>, Arc<T>>, changed: BTreeMap<Arc<str>, Option<Arc<T>>>) {
    for (name, value) in changed {
        match value {
            Some(value) => drop(values.insert(name, value)),
            None => drop(values.remove(&name)),
        }
    }
}
