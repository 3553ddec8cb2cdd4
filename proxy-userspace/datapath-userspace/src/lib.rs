//! A datapath of ordinary sockets: it listens where clients find a Service, and copies bytes to an endpoint.
//!
//! For a developer's machine. It needs no privilege and no feature of the kernel but sockets, and costs two connections and
//! two copies where the other datapaths cost nothing. Endpoints see the proxy as their client, SCTP is not served, and
//! traffic that must be dropped is refused.
//!
//! Invariant: a change is atomic, and touches no connection.
//! All frontends of a state replace those before under one lock; a new connection is given to an endpoint of the newest
//! state, and an established one is kept.

#![forbid(unsafe_code)]

mod affinity;
mod claims;
mod frontend;
mod listener;
mod log_limit;
mod options;
mod table;
mod tcp;
mod udp;

#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, sync::Arc};

use datapath::{ApplyReport, FrontendAddress};
use model::{Rejected, state::NodeState};

use self::{claims::Claims, listener::Listeners, table::Table};

pub use self::options::{ListenAt, Options};

/// The datapath. What it listens at is closed when this is dropped; established connections end with the runtime.
#[derive(Debug)]
pub struct Datapath {
    options: Options,
    /// The active state.
    state: NodeState,
    claims: Claims,
    table: Arc<Table>,
    listeners: Listeners,
}

impl Datapath {
    /// Serves nothing yet.
    #[must_use]
    pub fn new(options: Options) -> Self {
        Self {
            table: Arc::new(Table::new(options.inside.clone())),
            options,
            state: NodeState::default(),
            claims: Claims::default(),
            listeners: Listeners::default(),
        }
    }

    /// Makes a state active, at one moment for all new connections. Must be called within a tokio runtime.
    ///
    /// The cost is that of the difference to the active state. What cannot be listened at is reported, and tried again by
    /// [`Datapath::retry`].
    pub fn apply(&mut self, state: &NodeState) -> ApplyReport {
        let before = std::mem::replace(&mut self.state, state.clone());
        let mut changed_services = 0;
        let mut touched = BTreeSet::new();
        for (name, old, new) in state.diff(&before) {
            changed_services += 1;
            touched.extend(self.claims.replace(name, old, new, self.options.listen_at));
        }
        let is_changed = !touched.is_empty();
        let entries = touched.len();
        self.listen(touched);
        ApplyReport {
            changed_services,
            services: self.state.services.len(),
            entries,
            flipped: is_changed,
            rejected: self.rejected(),
            ..ApplyReport::default()
        }
    }

    /// Listens where that failed before. Must be called within a tokio runtime.
    pub fn retry(&mut self) {
        let failed = self.listeners.failed();
        if !failed.is_empty() {
            self.listen(failed);
        }
    }

    /// What is not served, and why.
    #[must_use]
    pub fn rejected(&self) -> Vec<Rejected> {
        self.claims.rejected().chain(self.listeners.rejected()).collect()
    }

    /// Whether [`Datapath::retry`] has something to do.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.listeners.has_failed()
    }

    /// Gives these addresses what they have now: first the sockets, then the frontends, and then what is accepted.
    fn listen(&mut self, touched: BTreeSet<FrontendAddress>) {
        let edits = touched.into_iter().map(|it| (it, self.claims.winner(&it))).collect::<Vec<_>>();
        let bound = self.listeners.bind(&edits, self.options.listen_at);
        self.table.replace(edits);
        self.listeners.start(bound, &self.table);
    }
}
