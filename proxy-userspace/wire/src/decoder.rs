//! The state of a node from one message after the other.
//!
//! The one rule: what is the same message again is not decoded again, and what is refused is said once.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use model::{
    ServiceName,
    facts::Rejected,
    state::{NodeState, ServiceState},
};
use proto::client::{ServiceEndpoints, State};

use crate::service_state;

/// Messages to state; what is the same message again is decoded once.
#[derive(Debug, Default)]
pub struct Decoder {
    known: BTreeMap<Arc<str>, Known>,
    said: BTreeSet<Rejected>,
}

#[derive(Debug)]
struct Known {
    message: Arc<ServiceEndpoints>,
    /// None if it is not to be served.
    state: Option<Arc<ServiceState>>,
    rejected: Vec<Rejected>,
}

impl Decoder {
    /// The state of a node; says in the log what of it was refused, if it has not said so before.
    pub fn decode(&mut self, state: &State) -> NodeState {
        self.known.retain(|name, _| state.services.contains_key(name));
        let mut services = BTreeMap::<ServiceName, _>::new();
        let mut refused = BTreeSet::new();
        for (path, message) in &state.services {
            if !self.known.get(path).is_some_and(|it| Arc::ptr_eq(&it.message, message)) {
                self.known.insert(Arc::clone(path), Known::new(message));
            }
            let Some(known) = self.known.get(path) else { continue };
            refused.extend(known.rejected.iter().cloned());
            if let Some(it) = &known.state {
                services.insert(it.service.name.clone(), Arc::clone(it));
            }
        }
        for it in refused.difference(&self.said) {
            tracing::warn!("not taken over from the brain: {it}");
        }
        self.said = refused;
        NodeState { services: services.into() }
    }
}

impl Known {
    fn new(message: &Arc<ServiceEndpoints>) -> Self {
        let endpoints = message.endpoints.iter().map(|(key, it)| (&**key, &**it));
        let decoded = service_state(&message.service, endpoints);
        let state = decoded.value.map(Arc::new);
        Self { message: Arc::clone(message), state, rejected: decoded.rejected }
    }
}
