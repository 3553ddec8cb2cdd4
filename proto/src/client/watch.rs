//! Follows the state of a node: as full states, or as differences.

use std::sync::Arc;

use super::{
    connect::Client,
    node_view::NodeView,
    session::Session,
    state::{NodeChange, State},
};

/// Follows the changes of a node's state; returned by [`Client::changes`](super::Client::changes).
///
/// ```no_run
/// # use proxy_contract::client::Client;
/// # async fn example(client: Client) {
/// let mut changes = client.changes();
/// loop {
///     let change = changes.next().await;
///     for (name, service) in &change.services {
///         match service {
///             Some(it) => println!("{name} has {} endpoints", it.endpoints.len()),
///             None => println!("{name} was deleted"),
///         }
///     }
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct ChangeWatch(Session<NodeView>);

/// Follows the full state of a node; returned by [`Client::watch`](super::Client::watch).
///
/// ```no_run
/// # use proxy_contract::client::Client;
/// # async fn example(client: Client) {
/// let mut states = client.watch();
/// loop {
///     let state = states.next().await;
///     println!("{} Services", state.services.len());
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct Watch {
    changes: ChangeWatch,
    last: Arc<State>,
}

impl ChangeWatch {
    pub(super) fn new(client: &Client) -> Self {
        Self(Session::new(client))
    }

    /// Tells the brain that the last difference is not active yet. Without this, the next call of [`next`](Self::next)
    /// acknowledges it.
    ///
    /// ```no_run
    /// # use proxy_contract::client::{Client, NodeChange};
    /// # async fn example(client: Client, apply: impl Fn(&NodeChange) -> bool) {
    /// let mut changes = client.changes();
    /// let change = changes.next().await;
    /// if !apply(&change) {
    ///     changes.unconfirmed();
    /// }
    /// # }
    /// ```
    pub fn unconfirmed(&mut self) {
        self.0.is_unconfirmed = true;
    }

    /// Tells the brain that the last difference, which was [unconfirmed](Self::unconfirmed), is active now.
    pub fn confirm(&mut self) {
        self.0.confirm();
    }

    /// Waits for a state that differs from the last one, and returns the difference; the first one is that to the empty
    /// state. Intermediate states are skipped.
    ///
    /// Errors and outages are logged, and it reconnects. Cancel safe.
    pub async fn next(&mut self) -> NodeChange {
        self.0.next().await
    }
}

impl Watch {
    pub(super) fn new(client: &Client) -> Self {
        Self { changes: ChangeWatch::new(client), last: Arc::default() }
    }

    /// Waits for a state that differs from the last one, and returns the newest; intermediate states are skipped.
    ///
    /// The cost is that of the changes, plus a copy of the maps if the caller still holds the previous state.
    ///
    /// Errors and outages are logged, and it reconnects. Cancel safe.
    pub async fn next(&mut self) -> Arc<State> {
        let change = self.changes.next().await;
        Arc::make_mut(&mut self.last).apply(change);
        Arc::clone(&self.last)
    }
}
