//! What the reflectors and the reader of the source share.

use std::{
    mem,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Poll,
};

use tokio::{sync::Notify, time::Instant};

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

#[derive(Debug, Default)]
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

    /// The result for the reader, if there is one.
    fn next(&mut self) -> Poll<Option<ClusterChanges>> {
        if self.is_broken {
            return Poll::Ready(None);
        }
        if !self.is_synced() || (self.is_complete && self.changes.is_empty()) {
            return Poll::Pending;
        }
        if !self.is_complete {
            self.is_complete = true;
            let [services, slices, nodes] = self.resources.each_ref().map(|it| it.objects);
            tracing::info!(services, slices, nodes, "all resources of the API server have been listed");
        }
        Poll::Ready(Some(mem::take(&mut self.changes)))
    }
}

impl Shared {
    pub(super) fn new(server: Option<IpAddr>) -> Self {
        let resources = [Service::PLURAL, EndpointSlice::PLURAL, Node::PLURAL];
        let state = State { resources: resources.map(ResourceStatus::new), ..State::default() };
        Self { state: Mutex::new(state), changed: Notify::new(), server }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for changes; the first ones are the whole cluster state. `None` if a reflector has ended.
    pub(super) async fn next(&self) -> Option<ClusterChanges> {
        loop {
            let changed = self.changed.notified();
            if let Poll::Ready(next) = self.state().next() {
                return next;
            }
            changed.await;
        }
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
