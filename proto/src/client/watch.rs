//! Follows the state of a node: as full states, or as differences.

use std::sync::Arc;

use super::{
    connect::Connector,
    node_view::NodeView,
    session::{Event, Session},
    state::{NodeChange, State},
    tracker::Tracker,
};

/// Follows the changes of a node's state; returned by [`Client::changes`](super::Client::changes).
#[derive(Debug)]
pub struct ChangeWatch {
    session: Session<NodeView>,
    tracker: Tracker<NodeView>,
    /// Whether the last difference is not active yet.
    is_unconfirmed: bool,
}

/// Follows the full state of a node; returned by [`Client::watch`](super::Client::watch).
#[derive(Debug)]
pub struct Watch {
    changes: ChangeWatch,
    last: Arc<State>,
}

impl ChangeWatch {
    pub(super) fn new(connector: &Connector) -> Self {
        Self { session: Session::new(connector), tracker: Tracker::default(), is_unconfirmed: false }
    }

    /// Tells the brain that the last difference is not active yet. Otherwise the next call acknowledges it.
    pub fn unconfirmed(&mut self) {
        self.is_unconfirmed = true;
        self.session.unconfirmed();
    }

    /// Tells the brain that the last difference, which was [unconfirmed](Self::unconfirmed), is active now.
    pub fn confirm(&mut self) {
        self.is_unconfirmed = false;
        self.session.confirm();
    }

    /// Waits for a state that differs from the last one, and returns the difference; the first one is that to the empty
    /// state. Intermediate states are skipped.
    ///
    /// Never returns `None`: errors and outages are logged, and it reconnects. Cancel safe.
    pub async fn next(&mut self) -> Option<NodeChange> {
        loop {
            match self.session.next().await {
                Event::Sync(revision) => {
                    if let Some(change) = self.tracker.finish(revision) {
                        self.is_unconfirmed = false;
                        return Some(change);
                    }
                    // The same state from another brain.
                    if self.is_unconfirmed {
                        self.session.unconfirmed();
                    }
                }
                event => self.tracker.apply(event),
            }
        }
    }
}

impl Watch {
    pub(super) fn new(connector: &Connector) -> Self {
        Self { changes: ChangeWatch::new(connector), last: Arc::default() }
    }

    /// Waits for a state that differs from the last one, and returns the newest; intermediate states are skipped.
    ///
    /// The cost is that of the changes, plus a copy of the maps if the caller still holds the previous state.
    ///
    /// Never returns `None`: errors and outages are logged, and it reconnects. Cancel safe.
    pub async fn next(&mut self) -> Option<Arc<State>> {
        let change = self.changes.next().await?;
        Arc::make_mut(&mut self.last).apply(change);
        Some(Arc::clone(&self.last))
    }
}
