//! The totals of a node's state, updated incrementally.
//!
//! Invariant: the cost is proportional to the difference between two states.

use std::sync::Arc;

use model::{
    Family, PerFamily,
    state::{Endpoint, NodeState, PortTarget, Scope, ServicePort, ServiceState, TrafficPolicy},
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
    /// Adds what differs between two states of a Service.
    pub(crate) fn add(&mut self, before: Option<&Arc<ServiceState>>, after: Option<&Arc<ServiceState>>) {
        let service = |it: Option<&Arc<ServiceState>>| it.map(|it| Arc::clone(&it.service));
        self.services += usize::from(service(before) != service(after));
        fn endpoints(state: Option<&Arc<ServiceState>>) -> (&[Arc<Endpoint>], &[PortTarget]) {
            state.map(|it| (&*it.endpoints, &*it.other_serving)).unwrap_or_default()
        }
        self.endpoints += usize::from(endpoints(before) != endpoints(after));
    }
}

impl Totals {
    /// Updates the totals of `before` to those of `after`.
    pub(crate) fn update(&mut self, before: &NodeState, after: &NodeState) {
        for (_, before, after) in after.diff(before) {
            before.into_iter().for_each(|it| self.count(it, usize::wrapping_sub));
            after.into_iter().for_each(|it| self.count(it, usize::wrapping_add));
        }
    }

    /// Adds or subtracts a Service.
    fn count(&mut self, state: &ServiceState, add: fn(usize, usize) -> usize) {
        let service = &state.service;
        self.services = add(self.services, 1);
        self.endpoints = add(self.endpoints, state.endpoints.len());
        for (sum, policy, scope) in [
            (&mut self.no_local_internal, service.internal_policy, Scope::Internal),
            (&mut self.no_local_external, service.external_policy, Scope::External),
        ] {
            for family in Family::ALL.into_iter().filter(|_| policy == TrafficPolicy::Local) {
                let is_dropped = |(index, port): &(usize, &ServicePort)| {
                    (scope == Scope::Internal || service.is_external(port, family))
                        && *port.has_any_endpoint.of(family)
                        && state.targets(*index, family, scope).next().is_none()
                };
                let dropped = service.ports.iter().enumerate().filter(is_dropped).count();
                *sum.of_mut(family) = add(*sum.of(family), dropped);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use super::*;
    use crate::fixtures;

    #[test]
    fn a_port_without_local_endpoints_counts_in_the_families_in_which_it_is_exposed() {
        let count = |load_balancer_ips: &[&str], node_port: Option<u16>| {
            let mut service = fixtures::service_spec("default", "web");
            service.cluster_ips.push("fd00::1".parse().unwrap());
            service.load_balancer_ips = load_balancer_ips.iter().map(|it| it.parse().unwrap()).collect();
            service.ports[0].node_port = node_port.map(|it| NonZeroU16::new(it).unwrap());
            service.ports[0].has_any_endpoint = PerFamily { v4: true, v6: true };
            service.external_policy = TrafficPolicy::Local;
            let mut totals = Totals::default();
            totals.count(&ServiceState::new(service, []), usize::wrapping_add);
            let PerFamily { v4, v6 } = totals.no_local_external;
            [v4, v6]
        };
        assert_eq!(count(&[], None), [0, 0]);
        assert_eq!(count(&["203.0.113.1"], None), [1, 0]);
        assert_eq!(count(&["203.0.113.1", "2001:db8::1"], None), [1, 1]);
        assert_eq!(count(&[], Some(30_080)), [1, 1]);
    }
}
