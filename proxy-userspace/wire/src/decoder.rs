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
    state::{NodeState, Nodes, ServiceState},
};
use proto::{
    client::{ServiceEndpoints, State},
    localv1,
};

use crate::{decode::Reader, node, service_state};

/// Messages to state; what is the same message again is decoded once.
#[derive(Debug, Default)]
pub struct Decoder {
    known: BTreeMap<Arc<str>, Known>,
    nodes: KnownNodes,
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
        refused.extend(self.nodes.take_in(&state.nodes));
        for it in refused.difference(&self.said) {
            tracing::warn!("not taken over from the brain: {it}");
        }
        self.said = refused;
        NodeState { services: services.into(), nodes: self.nodes.nodes.clone() }
    }
}

/// The nodes of the cluster, as they were said last.
#[derive(Debug, Default)]
struct KnownNodes {
    messages: BTreeMap<Arc<str>, Arc<localv1::Node>>,
    nodes: Nodes,
    rejected: Vec<Rejected>,
}

impl KnownNodes {
    /// Takes over what is said now, and returns what of it was refused.
    fn take_in(&mut self, messages: &BTreeMap<Arc<str>, Arc<localv1::Node>>) -> Vec<Rejected> {
        if self.messages != *messages {
            self.messages.clone_from(messages);
            self.rejected.clear();
            let read = messages.iter().map(|(name, it)| {
                let mut reader = Reader::new(format!("node {name}"));
                let node = node::read(&mut reader, &it.addresses, &it.pod_cidrs, it.is_leaving);
                self.rejected.extend(reader.into_rejected());
                (Arc::clone(name), node)
            });
            self.nodes = read.collect();
        }
        self.rejected.clone()
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
