//! The datapath: what is listened at, and the frontends that new connections use.
//!
//! Invariant: a change is atomic, and touches no connection.
//! All frontends of a state replace those before under one lock; a new connection is given to an endpoint of the newest
//! state, and an established one is kept.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ipnet::IpNet;
use proxy_contract::{backend::NotServed, client::ServiceEndpoints};

use crate::{claims::Claims, listen_at::ListenAt, listener::Listeners, table::Table};

/// The Services of a state, by `namespace/name`.
type Services = BTreeMap<Arc<str>, Arc<ServiceEndpoints>>;

/// The datapath. What it listens at is closed when this is dropped; established connections end with the runtime.
#[derive(Debug)]
pub(crate) struct Datapath {
    listen_at: ListenAt,
    claims: Claims,
    pub(crate) table: Arc<Table>,
    listeners: Listeners,
}

impl Datapath {
    /// Serves nothing yet. Sources in `inside` are inside the cluster, besides this host.
    pub(crate) fn new(listen_at: ListenAt, inside: Vec<IpNet>) -> Self {
        Self {
            listen_at,
            claims: Claims::default(),
            table: Arc::new(Table::new(inside)),
            listeners: Listeners::default(),
        }
    }

    /// Serves all of a state, at one moment for all new connections.
    pub(crate) fn apply_all(&mut self, services: &Services) {
        let names = services.keys().chain(self.claims.services()).cloned().collect();
        self.apply_some(services, &names);
    }

    /// Serves what has changed, at one moment for all new connections. What failed before is tried again.
    pub(crate) fn apply_some(&mut self, services: &Services, changed: &BTreeSet<Arc<str>>) {
        let mut touched = self.listeners.failed();
        for name in changed {
            touched.extend(self.claims.replace(name, services.get(name).map(AsRef::as_ref), self.listen_at));
        }
        // First the sockets, then the frontends, and then what is accepted.
        let edits = touched.into_iter().map(|it| (it, self.claims.winner(&it))).collect::<Vec<_>>();
        let bound = self.listeners.bind(&edits, self.listen_at);
        self.table.replace(edits);
        self.listeners.start(bound, &self.table);
    }

    /// What is not served, and why.
    pub(crate) fn not_served(&self) -> Vec<NotServed> {
        self.claims.not_served().chain(self.listeners.not_served()).collect()
    }
}
