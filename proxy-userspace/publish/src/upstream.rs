//! A node's state as another brain says it.
//!
//! The one rule: what has been said stays until something else is said.
//! An outage changes nothing; what cannot be read is refused alone, and once.

use std::sync::Arc;

use model::state::NodeState;
use proxy_contract::{client::Client, localnetv1::NextFilter, localv1::Revision};
use wire::{Extensions, NodeStateDecoder};

use crate::{Publisher, Subscription};

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
        let client = client.request_extensions(Extensions::LOCAL.iter());
        Self { client, publisher: Publisher::new(node), from: None }
    }

    /// The same by the long poll, beginning with what is not revision `rev` of the process `instance_id`.
    #[must_use]
    pub fn resume_from(self, instance_id: u64, rev: u64) -> Self {
        Self { from: Some(NextFilter { instance_id, rev, ..NextFilter::default() }), ..self }
    }

    /// Follows what is said.
    pub fn subscribe(&self) -> Subscription {
        self.publisher.subscribe()
    }

    /// Asks, and publishes what comes; it never ends.
    pub async fn run(&self) {
        let mut decoder = NodeStateDecoder::default();
        if let Some(from) = &self.from {
            let mut states = self.client.poll(from.clone());
            while let Some(state) = states.next().await {
                self.publish(state.revision, decoder.decode(&state));
            }
        } else {
            let mut changes = self.client.changes();
            while let Some(change) = changes.next().await {
                self.publish(change.revision, decoder.apply(&change));
            }
        }
    }

    fn publish(&self, revision: Option<Revision>, state: NodeState) {
        match revision {
            Some(it) => self.publisher.relay(it.instance_id, it.rev, state),
            None => {
                self.publisher.publish(state);
            }
        }
    }
}
