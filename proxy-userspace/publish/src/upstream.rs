//! Follows another brain and publishes its states of a node.
//!
//! During an outage the last state stays published. What cannot be decoded is rejected and reported once; the rest is
//! published.

use std::{future::pending, sync::Arc, time::Duration};

use model::{RequestedMetadata, state::NodeState};
use proxy_contract::{client::Client, localv1::Revision};
use tokio::{sync::watch, time::timeout};
use wire::{Extensions, NodeStateDecoder};

use crate::publisher::{Publisher, Subscription};

/// The time for which the next request waits for the last state to become active.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(2);

/// Follows a brain and publishes its states under the brain's revisions.
#[derive(Debug)]
pub struct Upstream {
    pub client: Client,
    publisher: Publisher,
    requested: RequestedMetadata,
    /// Instance and revision of the state that is active.
    active: Option<watch::Receiver<Option<(u64, u64)>>>,
}

impl Upstream {
    /// Publishes the states of `node` that `client` receives. Does not connect yet.
    pub fn new(client: Client, node: impl Into<Arc<str>>) -> Self {
        let client = client.request_extensions(Extensions::LOCAL.iter());
        Self {
            client,
            publisher: Publisher::new(node),
            requested: RequestedMetadata::default(),
            active: None,
        }
    }

    /// Publishes these labels and annotations of Services, too, as far as the brain sends them.
    #[must_use]
    pub fn with_metadata(self, requested: RequestedMetadata) -> Self {
        Self { requested, ..self }
    }

    /// Acknowledges a state when `active` has its instance and revision.
    #[must_use]
    pub fn confirmed_by(self, active: watch::Receiver<Option<(u64, u64)>>) -> Self {
        Self { active: Some(active), ..self }
    }

    pub fn subscribe(&self) -> Subscription {
        self.publisher.subscribe()
    }

    /// Follows the brain; never returns.
    pub async fn run(&self) {
        let mut decoder = NodeStateDecoder::new(self.requested.clone());
        let mut changes = self.client.changes();
        let mut is_confirmed = true;
        loop {
            let change = tokio::select! {
                change = changes.next() => change,
                () = self.active(), if !is_confirmed => {
                    changes.confirm();
                    is_confirmed = true;
                    continue;
                }
            };
            self.publish(change.revision, decoder.apply(&change));
            // Not for long: it may be that it cannot be applied, and that a newer state can.
            is_confirmed = timeout(CONFIRM_TIMEOUT, self.active()).await.is_ok();
            if !is_confirmed {
                changes.unconfirmed();
            }
        }
    }

    /// Waits until the published state is active.
    async fn active(&self) {
        let (Some(active), Some(published)) = (&self.active, self.publisher.current()) else { return };
        let revision = Some(published.revision());
        if active.clone().wait_for(|it| *it == revision).await.is_err() {
            pending::<()>().await;
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
