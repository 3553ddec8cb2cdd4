//! The totals of a node's state, updated incrementally.
//!
//! Invariant: the cost is proportional to the difference between two states.

use std::sync::Arc;

use model::{
    Family,
    state::{Endpoint, NodeState, OtherServing, Scope, ServiceState, TrafficPolicy},
};

/// How much a state contains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) services: usize,
    pub(crate) endpoints: usize,
    /// Service ports with an internal policy Local and no endpoint on this node.
    pub(crate) no_local_internal: usize,
    /// The same with an external policy Local.
    pub(crate) no_local_external: usize,
}

/// How much of a state differs from the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangeCounts {
    /// Services that were added, removed or redefined.
    pub(crate) services: usize,
    /// Services with changed endpoints.
    pub(crate) endpoints: usize,
}

impl ChangeCounts {
    pub(crate) fn between(before: &NodeState, after: &NodeState) -> Self {
        let mut changes = Self::default();
        for (_, before, after) in after.diff(before) {
            let service = |it: Option<&Arc<ServiceState>>| it.map(|it| Arc::clone(&it.service));
            changes.services += usize::from(service(before) != service(after));
            fn endpoints(state: Option<&Arc<ServiceState>>) -> (&[Arc<Endpoint>], &[OtherServing]) {
                state.map(|it| (&*it.endpoints, &*it.other_serving)).unwrap_or_default()
            }
            changes.endpoints += usize::from(endpoints(before) != endpoints(after));
        }
        changes
    }
}

impl Totals {
    /// Updates the totals of `before` to those of `after`.
    pub(crate) fn update(&mut self, before: &NodeState, after: &NodeState) {
        for (_, before, after) in after.diff(before) {
            let of = |it: Option<&Arc<ServiceState>>| it.map_or_else(Self::default, |it| Self::of(it));
            let (removed, added) = (of(before), of(after));
            self.services = self.services + added.services - removed.services;
            self.endpoints = self.endpoints + added.endpoints - removed.endpoints;
            self.no_local_internal =
                self.no_local_internal + added.no_local_internal - removed.no_local_internal;
            self.no_local_external =
                self.no_local_external + added.no_local_external - removed.no_local_external;
        }
    }

    fn of(state: &ServiceState) -> Self {
        let service = &state.service;
        let ports_without_endpoint = |scope| {
            let ports = 0..service.ports.len();
            let is_empty = |port: &usize| {
                [Family::V4, Family::V6].iter().all(|it| state.targets(*port, *it, scope).next().is_none())
            };
            ports.filter(is_empty).count()
        };
        let is_local = |policy| policy == TrafficPolicy::Local;
        let is_external = !service.external_ips.is_empty()
            || !service.load_balancer_ips.is_empty()
            || service.ports.iter().any(|it| it.node_port.is_some());
        let (internal, external) = (is_local(service.internal_policy), is_local(service.external_policy));
        Self {
            services: 1,
            endpoints: state.endpoints.len(),
            no_local_internal: if internal { ports_without_endpoint(Scope::Internal) } else { 0 },
            no_local_external: if external && is_external {
                ports_without_endpoint(Scope::External)
            } else {
                0
            },
        }
    }
}
