//! The backends to which existing connections and flows may continue, by Service address. Pure.
//!
//! Invariant: in doubt they continue: every endpoint that serves an address is allowed, selected for this node or not.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::SocketAddr,
    sync::Arc,
};

use datapath::unspecified;
use model::{
    Family, Protocol,
    state::{NodeState, ServiceState},
};
use proxy_common::probe;

use crate::tables::compile::{Frontend, compile};

/// The address of a Service, or a node port at the unspecified address, and one of its backends.
pub type BackendPair = (SocketAddr, SocketAddr);

/// The allowed backends of each UDP frontend.
#[derive(Debug, Default)]
pub struct AllowedBackends(HashMap<SocketAddr, HashSet<SocketAddr>>);

impl AllowedBackends {
    pub fn of(state: &NodeState) -> Self {
        let mut allowed = Self::default();
        for service in state.services.values() {
            for it in compiled_frontends(service, Protocol::Udp) {
                allowed.0.entry(it.address.address).or_default().extend(backends(service, &it));
            }
        }
        allowed
    }

    /// Whether `backend` serves the frontend at `service`, an address of a Service or a node port at any address.
    pub fn contains(&self, service: SocketAddr, backend: SocketAddr) -> bool {
        // Flows of the probe belong to no Service, and end on their own.
        if probe::is_probe(service.ip().into()) {
            return true;
        }
        let frontend = self.0.get(&service).or_else(|| self.0.get(&as_node_port(service)));
        frontend.is_some_and(|it| it.contains(&backend))
    }
}

/// The frontend of a destination that may be a node port.
pub fn as_node_port(destination: SocketAddr) -> SocketAddr {
    SocketAddr::new(unspecified(Family::of(destination.ip())), destination.port())
}

/// Whether a UDP flow that was allowed before is not allowed now.
pub fn udp_lost(before: &NodeState, now: &NodeState) -> bool {
    now.diff(before).any(|(_, before, now)| {
        let pairs =
            |it: Option<&Arc<ServiceState>>| it.map(|it| pairs(it, Protocol::Udp)).unwrap_or_default();
        let before = pairs(before);
        !before.is_empty() && !before.is_subset(&pairs(now))
    })
}

/// Whether any Service with a UDP port differs.
pub fn udp_differs(before: &NodeState, now: &NodeState) -> bool {
    now.diff(before)
        .any(|(_, before, now)| [before, now].into_iter().flatten().any(|it| has(it, Protocol::Udp)))
}

fn has(it: &ServiceState, protocol: Protocol) -> bool {
    it.service.ports.iter().any(|it| it.protocol == protocol)
}

/// The frontends of a Service with one protocol, each with each of its backends.
pub fn pairs(service: &ServiceState, protocol: Protocol) -> BTreeSet<BackendPair> {
    let mut pairs = BTreeSet::new();
    for it in compiled_frontends(service, protocol) {
        pairs.extend(backends(service, &it).map(|backend| (it.address.address, backend)));
    }
    pairs
}

/// The frontends of a Service with one protocol.
pub fn frontends(service: &ServiceState, protocol: Protocol) -> BTreeSet<SocketAddr> {
    compiled_frontends(service, protocol).map(|it| it.address.address).collect()
}

/// The frontends of a Service with one protocol; a node port has the unspecified address.
fn compiled_frontends(service: &ServiceState, protocol: Protocol) -> impl Iterator<Item = Frontend> {
    let image = has(service, protocol).then(|| {
        // The source ranges of a load balancer IP apply to new flows only.
        let open = (!service.service.source_ranges.is_empty()).then(|| {
            let mut open = service.clone();
            Arc::make_mut(&mut open.service).source_ranges.clear();
            open
        });
        // A flow that was redirected before its address came to the host continues, too.
        compile(open.as_ref().unwrap_or(service), &BTreeSet::new())
    });
    let frontends = image.into_iter().flat_map(|it| it.frontends);
    frontends.filter(move |it| it.address.protocol == protocol)
}

/// All backends of a frontend, some of them maybe twice: existing flows also continue to endpoints of another scope than the
/// address has now, and to endpoints that are not selected for this node.
fn backends(service: &ServiceState, frontend: &Frontend) -> impl Iterator<Item = SocketAddr> {
    let (family, port) = (frontend.address.family(), frontend.port);
    let is_own = move |index: u16| usize::from(index) == port;
    let selected = service.endpoints.iter().flat_map(move |endpoint| {
        let ports = endpoint.ports.iter().filter(move |it| is_own(it.index));
        ports.filter_map(move |it| Some(SocketAddr::new(endpoint.address(family)?, it.port.get())))
    });
    let others = service.other_serving.iter().filter(move |it| is_own(it.index)).map(|it| it.target);
    selected.chain(others)
}

#[cfg(test)]
mod tests {
    use model::state::{EndpointPort, PortTarget, ServicePort};

    use super::*;
    use crate::fixtures::{ALL_SCOPES, endpoint, number, port, service, state_of};

    /// A Service with a UDP port 53, node port 30053, and a TCP port of the same number, with these endpoints; and others
    /// that serve it and were not selected.
    fn state(endpoints: &[u8], unselected: &[u8]) -> NodeState {
        let port = |protocol, node_port| ServicePort {
            node_port: Some(number(node_port)),
            ..port(&format!("{protocol}"), protocol, 53)
        };
        let ports = vec![port(Protocol::Tcp, 30054), port(Protocol::Udp, 30053)];
        let service = service("dns", [[10, 96, 0, 10].into()], ports);
        let ports = [0, 1].map(|index| EndpointPort { index, port: number(5353), scopes: ALL_SCOPES });
        let endpoint = |n: &u8| endpoint((*n).into(), Some([10, 1, 0, *n].into()), None, ports);
        let mut service = ServiceState::new(service, endpoints.iter().map(endpoint));
        service.other_serving =
            unselected.iter().map(|n| PortTarget { index: 1, target: backend(*n) }).collect();
        state_of([service])
    }

    fn backend(n: u8) -> SocketAddr {
        SocketAddr::from(([10, 1, 0, n], 5353))
    }

    fn addresses() -> [SocketAddr; 3] {
        ["10.96.0.10:53", "192.0.2.1:30053", "127.0.0.1:30053"].map(|it| it.parse().unwrap())
    }

    #[test]
    fn a_flow_is_allowed_while_its_endpoint_serves_the_address() {
        let allowed = AllowedBackends::of(&state(&[1, 2], &[3]));
        for address in addresses() {
            assert!([1, 2, 3].iter().all(|n| allowed.contains(address, backend(*n))), "{address}");
            assert!(!allowed.contains(address, backend(4)));
        }
        assert!(!allowed.contains("10.96.0.10:54".parse().unwrap(), backend(1)));
        assert!(!allowed.contains("192.0.2.1:30054".parse().unwrap(), backend(1)), "that is the TCP port");
        assert!(!AllowedBackends::of(&state(&[], &[])).contains(addresses()[0], backend(1)));
    }

    #[test]
    fn a_flow_continues_if_only_the_policy_of_its_address_changes() {
        let before = state(&[1], &[]);
        let mut service = ServiceState::clone(before.services.iter().next().unwrap().1);
        for port in Arc::make_mut(&mut Arc::make_mut(&mut service.endpoints[0]).ports) {
            port.scopes.internal = false;
        }
        let now = state_of([service]);
        assert!(!udp_lost(&before, &now));
        for address in addresses() {
            assert!(AllowedBackends::of(&now).contains(address, backend(1)), "{address}");
        }
    }

    #[test]
    fn a_flow_continues_if_only_the_source_ranges_of_its_address_change() {
        let with = |ranges: &[&str]| {
            let mut service = ServiceState::clone(state(&[1], &[]).services.iter().next().unwrap().1);
            let inner = Arc::make_mut(&mut service.service);
            inner.load_balancer_ips = vec![[203, 0, 113, 1].into()];
            inner.source_ranges = ranges.iter().map(|it| it.parse().unwrap()).collect();
            state_of([service])
        };
        let now = with(&["198.51.100.0/24"]);
        assert!(!udp_lost(&with(&[]), &now));
        assert!(AllowedBackends::of(&now).contains("203.0.113.1:53".parse().unwrap(), backend(1)));
    }

    #[test]
    fn flows_are_lost_with_an_endpoint_and_not_with_its_selection() {
        let before = state(&[1, 2], &[]);
        assert!(!udp_lost(&before, &before));
        assert!(!udp_lost(&before, &state(&[1, 2, 3], &[])));
        assert!(!udp_lost(&before, &state(&[1], &[2])), "it still serves, though new flows do not go there");
        assert!(udp_lost(&before, &state(&[1], &[])));
        assert!(udp_lost(&state(&[1], &[2]), &state(&[1], &[])));
        assert!(udp_lost(&before, &NodeState::default()));
        assert!(udp_differs(&before, &state(&[1], &[2])) && !udp_differs(&before, &before));
    }
}
