//! What a state comes to in numbers, kept up to date by the difference from one to the next.
//!
//! The one rule: it costs what differs.

use std::sync::Arc;

use model::{
    Family,
    state::{Endpoint, NodeState, OtherServing, Scope, ServiceState, TrafficPolicy},
};

/// What is in a state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) services: usize,
    pub(crate) endpoints: usize,
    /// Service ports that nothing on this node may answer, under an internal policy Local.
    pub(crate) no_local_internal: usize,
    /// The same under an external policy Local.
    pub(crate) no_local_external: usize,
}

/// How much of a state differs from the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// Services that are new, gone or defined differently.
    pub(crate) services: usize,
    /// Services whose endpoints are others.
    pub(crate) endpoints: usize,
}

impl Changes {
    /// What changed from one state to another.
    pub(crate) fn between(before: &NodeState, now: &NodeState) -> Self {
        let mut changes = Self::default();
        for (_, before, now) in now.diff(before) {
            let service = |it: Option<&Arc<ServiceState>>| it.map(|it| Arc::clone(&it.service));
            changes.services += usize::from(service(before) != service(now));
            fn endpoints(state: Option<&Arc<ServiceState>>) -> (&[Arc<Endpoint>], &[OtherServing]) {
                state.map(|it| (&*it.endpoints, &*it.other_serving)).unwrap_or_default()
            }
            changes.endpoints += usize::from(endpoints(before) != endpoints(now));
        }
        changes
    }
}

impl Tally {
    /// From the state that was counted to another one.
    pub(crate) fn update(&mut self, before: &NodeState, now: &NodeState) {
        for (_, before, now) in now.diff(before) {
            if let Some(before) = before {
                let it = Self::of(before);
                self.services -= it.services;
                self.endpoints -= it.endpoints;
                self.no_local_internal -= it.no_local_internal;
                self.no_local_external -= it.no_local_external;
            }
            if let Some(now) = now {
                let it = Self::of(now);
                self.services += it.services;
                self.endpoints += it.endpoints;
                self.no_local_internal += it.no_local_internal;
                self.no_local_external += it.no_local_external;
            }
        }
    }

    fn of(state: &ServiceState) -> Self {
        let service = &state.service;
        let nothing_for = |scope| {
            let ports = 0..service.ports.len();
            let is_empty = |port: &usize| {
                [Family::V4, Family::V6].iter().all(|it| state.targets(*port, *it, scope).next().is_none())
            };
            ports.filter(is_empty).count()
        };
        let is_local = |policy| policy == TrafficPolicy::Local;
        let is_reachable = !service.external_ips.is_empty()
            || !service.load_balancer_ips.is_empty()
            || service.ports.iter().any(|it| it.node_port.is_some());
        let (internal, external) = (is_local(service.internal_policy), is_local(service.external_policy));
        Self {
            services: 1,
            endpoints: state.endpoints.len(),
            no_local_internal: if internal { nothing_for(Scope::Internal) } else { 0 },
            no_local_external: if external && is_reachable { nothing_for(Scope::External) } else { 0 },
        }
    }
}
