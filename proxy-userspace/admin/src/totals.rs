//! The totals of a node's state, updated incrementally.
//!
//! Invariant: the cost is proportional to the difference between two states.

use std::sync::Arc;

use model::{
    Family, PerFamily,
    state::{Endpoint, NodeState, OtherServing, Scope, ServicePort, ServiceState, TrafficPolicy},
};

/// How much a state contains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) services: usize,
    pub(crate) endpoints: usize,
    /// Service ports with an internal policy Local whose endpoints are all on other nodes.
    pub(crate) no_local_internal: PerFamily<usize>,
    /// The same with an external policy Local.
    pub(crate) no_local_external: PerFamily<usize>,
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
        after.diff(before).for_each(|(_, before, after)| changes.add(before, after));
        changes
    }

    /// Adds what differs between two states of a Service.
    pub(crate) fn add(&mut self, before: Option<&Arc<ServiceState>>, after: Option<&Arc<ServiceState>>) {
        let service = |it: Option<&Arc<ServiceState>>| it.map(|it| Arc::clone(&it.service));
        self.services += usize::from(service(before) != service(after));
        fn endpoints(state: Option<&Arc<ServiceState>>) -> (&[Arc<Endpoint>], &[OtherServing]) {
            state.map(|it| (&*it.endpoints, &*it.other_serving)).unwrap_or_default()
        }
        self.endpoints += usize::from(endpoints(before) != endpoints(after));
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
            for family in Family::ALL {
                let update =
                    |sum: &mut PerFamily<usize>, added: PerFamily<usize>, removed: PerFamily<usize>| {
                        let sum = sum.of_mut(family);
                        *sum = *sum + added.of(family) - removed.of(family);
                    };
                update(&mut self.no_local_internal, added.no_local_internal, removed.no_local_internal);
                update(&mut self.no_local_external, added.no_local_external, removed.no_local_external);
            }
        }
    }

    fn of(state: &ServiceState) -> Self {
        let service = &state.service;
        let is_external = !service.external_ips.is_empty()
            || !service.load_balancer_ips.is_empty()
            || service.ports.iter().any(|it| it.node_port.is_some());
        let without_endpoint = |policy, scope, family: Family| {
            let is_dropped = |(index, port): &(usize, &ServicePort)| {
                *port.has_any_endpoint.of(family) && state.targets(*index, family, scope).next().is_none()
            };
            let is_local = policy == TrafficPolicy::Local && (is_external || scope == Scope::Internal);
            if is_local { service.ports.iter().enumerate().filter(is_dropped).count() } else { 0 }
        };
        let per_family = |policy, scope| PerFamily {
            v4: without_endpoint(policy, scope, Family::V4),
            v6: without_endpoint(policy, scope, Family::V6),
        };
        Self {
            services: 1,
            endpoints: state.endpoints.len(),
            no_local_internal: per_family(service.internal_policy, Scope::Internal),
            no_local_external: per_family(service.external_policy, Scope::External),
        }
    }
}
