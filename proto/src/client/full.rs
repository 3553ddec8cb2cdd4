//! The full state on every change.
//!
//! The one rule: a state is handed out whole, and only if it differs from the one before.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    Client,
    local::{Event, Local},
    session::Session,
};
use crate::localv1::{Addition, Endpoint, Node, Revision, Service};

/// All that one node serves.
///
/// What did not change is shared with the state before: pointers that are equal are values that are equal.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// What tells it from other states, if the brain says so: KPNG's does not.
    pub revision: Option<Revision>,
    /// What the brain says beyond KPNG's API, of what the client wanted: what is not among them is not said.
    pub granted: Vec<Addition>,
    /// The nodes of the cluster, by name; none if the brain does not say.
    pub nodes: BTreeMap<Arc<str>, Arc<Node>>,
    /// The Services, by `namespace/name`.
    pub services: BTreeMap<Arc<str>, Arc<ServiceEndpoints>>,
}

/// A Service and the endpoints that the node may use for it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceEndpoints {
    /// The Service.
    pub service: Service,
    /// The endpoints by what they are called within the Service: the pod's name, or an opaque word.
    pub endpoints: BTreeMap<Arc<str>, Arc<Endpoint>>,
}

/// Follows the full state of a node: what [`Client::watch`] returns.
#[derive(Debug)]
pub struct Watch {
    session: Session<Local>,
    building: Building,
    last: Option<Arc<State>>,
}

/// A state in the making.
#[derive(Debug, Default)]
struct Building {
    granted: Vec<Addition>,
    nodes: BTreeMap<Arc<str>, Arc<Node>>,
    services: BTreeMap<Arc<str>, Arc<ServiceEndpoints>>,
    /// Endpoints without a Service; there are none at a sync if the brain keeps the rules.
    orphans: BTreeMap<String, BTreeMap<Arc<str>, Arc<Endpoint>>>,
    /// Whether it was begun anew: what is equal is not shared yet.
    anew: bool,
    /// Whether anything has been said since the last state.
    touched: bool,
}

impl Watch {
    pub(super) fn new(client: &Client) -> Self {
        Self { session: Session::new(client, Local::new(client)), building: Building::default(), last: None }
    }

    /// Waits for a state that differs from the one before: the newest one. Several changes while nobody waits are one.
    ///
    /// It is never `None`: no error and no outage is the end. Nothing is lost if it is dropped while it waits.
    pub async fn next(&mut self) -> Option<Arc<State>> {
        loop {
            let event = self.session.next().await;
            let Event::Sync(revision) = event else {
                self.building.take_in(event);
                continue;
            };
            let Some(state) = self.building.finish(revision, self.last.as_deref()) else { continue };
            let state = Arc::new(state);
            self.last = Some(Arc::clone(&state));
            return Some(state);
        }
    }
}

impl Building {
    fn take_in(&mut self, event: Event) {
        self.touched = true;
        match event {
            Event::Reset(granted) => *self = Self { granted, anew: true, touched: true, ..Self::default() },
            Event::SetNode(name, node) => drop(self.nodes.insert(name.into(), Arc::new(node))),
            Event::DeleteNode(name) => drop(self.nodes.remove(name.as_str())),
            Event::SetService(name, service) => {
                let orphans = self.orphans.remove(&name);
                let it = Arc::make_mut(self.services.entry(name.into()).or_default());
                it.service = service;
                it.endpoints.extend(orphans.into_iter().flatten());
            }
            Event::DeleteService(name) => {
                if let Some(it) = self.services.remove(name.as_str()).filter(|it| !it.endpoints.is_empty()) {
                    self.orphans.insert(name, it.endpoints.clone());
                }
            }
            Event::SetEndpoint(service, key, endpoint) => {
                let endpoints = match self.services.get_mut(service.as_str()) {
                    Some(it) => &mut Arc::make_mut(it).endpoints,
                    None => self.orphans.entry(service).or_default(),
                };
                endpoints.insert(key.into(), Arc::new(endpoint));
            }
            Event::DeleteEndpoint(service, key) => {
                if let Some(it) = self.services.get_mut(service.as_str()) {
                    Arc::make_mut(it).endpoints.remove(key.as_str());
                } else if let Some(it) = self.orphans.get_mut(&service) {
                    it.remove(key.as_str());
                }
            }
            Event::Sync(_) => {}
        }
    }

    /// The state, unless it is the last one again.
    fn finish(&mut self, revision: Option<Revision>, last: Option<&State>) -> Option<State> {
        let touched = std::mem::take(&mut self.touched);
        let anew = std::mem::take(&mut self.anew);
        if let Some(last) = last {
            if !touched {
                return None;
            }
            if anew {
                let services = share(&mut self.services, &last.services);
                let nodes = share(&mut self.nodes, &last.nodes);
                if services && nodes && self.granted == last.granted {
                    return None;
                }
            }
        }
        let (granted, nodes) = (self.granted.clone(), self.nodes.clone());
        Some(State { revision, granted, nodes, services: self.services.clone() })
    }
}

/// Takes over what is equal; whether all is.
pub(super) fn share<T: PartialEq>(
    now: &mut BTreeMap<Arc<str>, Arc<T>>,
    before: &BTreeMap<Arc<str>, Arc<T>>,
) -> bool {
    let mut equal = 0;
    for (name, it) in &mut *now {
        if let Some(old) = before.get(name).filter(|old| *old == it) {
            *it = Arc::clone(old);
            equal += 1;
        }
    }
    equal == before.len() && equal == now.len()
}
