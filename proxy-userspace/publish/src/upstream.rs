//! A node's state as another brain says it.
//!
//! The one rule: what has been said stays until something else is said.
//! An outage changes nothing; what cannot be read is refused alone, and once.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use model::{
    ServiceName,
    facts::Rejected,
    state::{NodeState, ServiceState},
};
use proto::{
    client::{Client, ServiceEndpoints, State},
    localnetv1::NextFilter,
};

use crate::{Publisher, Subscription, wire};

/// Follows a brain, and publishes what it says under the revisions that it gives.
#[derive(Debug)]
pub struct Upstream {
    client: Client,
    publisher: Publisher,
    from: Option<NextFilter>,
}

impl Upstream {
    /// Follows the state of `node`, as the brain of `client` says it. Nothing is asked for yet.
    pub fn new(client: Client, node: impl Into<Arc<str>>) -> Self {
        Self { client, publisher: Publisher::new(node), from: None }
    }

    /// The same by the long poll, beginning with what is not revision `rev` of the process `instance_id`.
    #[must_use]
    pub fn resuming(self, instance_id: u64, rev: u64) -> Self {
        Self { from: Some(NextFilter { instance_id, rev, ..NextFilter::default() }), ..self }
    }

    /// Follows what is said.
    pub fn subscribe(&self) -> Subscription {
        self.publisher.subscribe()
    }

    /// Asks, and publishes what comes; it never ends.
    pub async fn follow(&self) {
        let mut decoder = Decoder::default();
        if let Some(from) = &self.from {
            let mut states = self.client.poll(from.clone());
            while let Some(state) = states.next().await {
                self.publish(&state, &mut decoder);
            }
        } else {
            let mut states = self.client.watch();
            while let Some(state) = states.next().await {
                self.publish(&state, &mut decoder);
            }
        }
    }

    fn publish(&self, state: &State, decoder: &mut Decoder) {
        let node_state = decoder.decode(state);
        match state.revision {
            Some(it) => self.publisher.relay(it.instance_id, it.rev, node_state),
            None => {
                self.publisher.publish(node_state);
            }
        }
    }
}

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
        NodeState { services: services.into(), ..NodeState::default() }
    }
}

impl Known {
    fn new(message: &Arc<ServiceEndpoints>) -> Self {
        let endpoints = message.endpoints.iter().map(|(key, it)| (&**key, &**it));
        let decoded = wire::service_state(&message.service, endpoints);
        let state = decoded.value.map(Arc::new);
        Self { message: Arc::clone(message), state, rejected: decoded.rejected }
    }
}
