//! What the reflectors and the reader of the source share.

use std::{
    mem,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::{
    sync::{Notify, futures::Notified},
    time::Instant,
};

use super::{
    apiserver_holddown::ApiServerHoldDown, resource::Resource, status::ResourceStatus, store::Store,
};
use crate::{
    ClusterChanges,
    kube_types::objects::{EndpointSlice, Node, Service},
};

#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Notify,
    /// The IP address of the API server; `None` if it is configured by name.
    server: Option<IpAddr>,
}

#[derive(Debug)]
struct State {
    /// Changes that the reader has not taken yet.
    changes: ClusterChanges,
    resources: [ResourceStatus; 3],
    hold_down: ApiServerHoldDown,
    /// Whether the reader has taken the whole cluster state once.
    is_complete: bool,
    /// Whether a reflector has ended, which none should.
    is_broken: bool,
}

/// What there is for the reader.
pub(super) enum Next {
    Changes(ClusterChanges),
    Pending,
    End,
}

/// The current status of the watches.
#[derive(Clone, Debug)]
pub struct Health(pub(super) Arc<Shared>);

impl Health {
    /// The status of Services, EndpointSlices and Nodes.
    pub fn resources(&self) -> [ResourceStatus; 3] {
        self.0.state().resources.clone()
    }

    /// Whether all resources have been listed once.
    pub fn is_synced(&self) -> bool {
        self.0.state().is_synced()
    }
}

impl State {
    fn is_synced(&self) -> bool {
        self.resources.iter().all(|it| it.is_synced)
    }
}

impl Shared {
    pub(super) fn new(server: Option<IpAddr>) -> Self {
        let resources = [Service::PLURAL, EndpointSlice::PLURAL, Node::PLURAL];
        let state = State {
            changes: ClusterChanges::default(),
            resources: resources.map(ResourceStatus::new),
            hold_down: ApiServerHoldDown::default(),
            is_complete: false,
            is_broken: false,
        };
        Self { state: Mutex::new(state), changed: Notify::new(), server }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there may be something to take.
    pub(super) fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    pub(super) fn take_changes(&self) -> Next {
        let mut state = self.state();
        if state.is_broken {
            return Next::End;
        }
        if !state.is_synced() || (state.is_complete && state.changes.is_empty()) {
            return Next::Pending;
        }
        if !state.is_complete {
            state.is_complete = true;
            let [services, slices, nodes] = state.resources.each_ref().map(|it| it.objects);
            tracing::info!(services, slices, nodes, "all resources of the API server have been listed");
        }
        Next::Changes(mem::take(&mut state.changes))
    }

    /// The server has responded.
    pub(super) fn contact(&self, resource: usize) {
        self.state().resources[resource].contact();
    }

    /// A request has failed.
    pub(super) fn failed(&self, resource: usize, error: &str, next: Instant) {
        self.state().resources[resource].failed(error, next);
    }

    /// A reflector has ended.
    pub(super) fn broken(&self) {
        self.state().is_broken = true;
        self.changed.notify_one();
    }

    /// Takes the changes of a resource over from its reflector's store.
    pub(super) fn publish<R: Resource>(&self, store: &mut Store<R>) {
        let mut changes = store.take_changes();
        let mut state = self.state();
        let state = &mut *state;
        let status = &mut state.resources[R::INDEX];
        status.contact();
        (status.objects, status.rejected) = (store.len(), store.rejected());
        status.is_synced = store.is_synced();
        R::hold_down(&mut state.hold_down, &mut changes, self.server);
        if !changes.is_empty() {
            R::changes_in(&mut state.changes).extend(changes);
        }
        // The first list may be empty.
        if !state.changes.is_empty() || !state.is_complete {
            self.changed.notify_one();
        }
    }
}
