//! Which UDP flows still have a place to go: for each Service address the endpoints that serve it. Pure.
//!
//! The one rule: in doubt a flow is spared. Whoever serves an address is among its endpoints, chosen for this node or not.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use model::{
    Family, Protocol,
    state::{NodeState, ServiceState},
};

use proxy_common::probe;

use crate::compile::{Frontend, Transport, compile};
use datapath::FrontendKind;

/// Where flows to each UDP address may go.
#[derive(Debug, Default)]
pub(crate) struct Flows(HashMap<SocketAddr, HashSet<SocketAddr>>);

impl Flows {
    /// Those of a state.
    pub(crate) fn of(state: &NodeState) -> Self {
        let mut flows = Self::default();
        for (_, service) in &state.services {
            each(service, |frontend, backend| {
                flows.0.entry(frontend).or_default().extend(backend);
            });
        }
        flows
    }

    /// Whether `backend` still serves a Service's address, or the node port that it is.
    pub(crate) fn serves(&self, service: SocketAddr, backend: SocketAddr) -> bool {
        // The canary's are nobody's, and end by themselves.
        if probe::is_probe(service.ip().into()) {
            return true;
        }
        let any = match service {
            SocketAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let backends = self.0.get(&service).or_else(|| self.0.get(&SocketAddr::new(any, service.port())));
        backends.is_some_and(|it| it.contains(&backend))
    }
}

/// Whether there are flows that had a place to go before and have none now.
pub fn lost(before: &NodeState, now: &NodeState) -> bool {
    now.diff(before).any(|(_, before, now)| {
        let before = before.map(|it| pairs(it)).unwrap_or_default();
        !before.is_empty() && !before.is_subset(&now.map(|it| pairs(it)).unwrap_or_default())
    })
}

/// Whether any UDP Service differs.
pub fn differ(before: &NodeState, now: &NodeState) -> bool {
    let has_udp = |it: &ServiceState| it.service.ports.iter().any(|it| it.protocol == Protocol::Udp);
    now.diff(before)
        .any(|(_, before, now)| before.is_some_and(|it| has_udp(it)) || now.is_some_and(|it| has_udp(it)))
}

fn pairs(service: &ServiceState) -> BTreeSet<(SocketAddr, SocketAddr)> {
    let mut pairs = BTreeSet::new();
    each(service, |frontend, backend| pairs.extend(backend.map(|it| (frontend, it))));
    pairs
}

/// Goes through the UDP addresses of a Service; a node port's address is the unspecified one.
fn each(service: &ServiceState, mut visit: impl FnMut(SocketAddr, Option<SocketAddr>)) {
    if service.service.ports.iter().all(|it| it.protocol != Protocol::Udp) {
        return;
    }
    // From where a load balancer IP may be reached is asked of what begins, not of what is there.
    let open = (!service.service.source_ranges.is_empty()).then(|| {
        let mut open = service.clone();
        Arc::make_mut(&mut open.service).source_ranges.clear();
        open
    });
    let image = compile(open.as_ref().unwrap_or(service));
    for frontend in image.frontends.iter().filter(|it| it.address.transport == Transport::Udp) {
        let address = frontend.address.address;
        visit(address, None);
        // What goes to these already is left alone: those of another scope than the address has now, and those that are not
        // chosen for this node at all.
        let family = Family::of(address.ip());
        for endpoint in &service.endpoints {
            let Some(ip) = endpoint.address(family) else { continue };
            for port in endpoint.ports.iter().filter(|it| is_of(service, frontend, it.index)) {
                visit(address, Some(SocketAddr::new(ip, port.port.get())));
            }
        }
        for unselected in service.other_serving.iter().filter(|it| is_of(service, frontend, it.index)) {
            visit(address, Some(unselected.target));
        }
    }
}

/// Whether a frontend is one of a port of its Service.
fn is_of(service: &ServiceState, frontend: &Frontend, index: u16) -> bool {
    service.service.ports.get(usize::from(index)).is_some_and(|port| {
        let number = if frontend.claim == FrontendKind::NodePort { port.node_port } else { Some(port.port) };
        port.protocol == Protocol::Udp && number.is_some_and(|it| it.get() == frontend.address.address.port())
    })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use model::{
        ServiceName,
        state::{
            Endpoint, EndpointKey, EndpointPort, OtherServing, Scopes, Service, ServiceKind, ServicePort,
            TargetPort,
        },
    };

    use super::*;

    const DNS: u16 = 53;

    fn port(number: u16) -> NonZeroU16 {
        NonZeroU16::new(number).unwrap()
    }

    /// A Service with a UDP port 53, node port 30053, and a TCP one of the same number, and these endpoints; and others
    /// that serve it and were not chosen.
    fn state(endpoints: &[u8], unselected: &[u8]) -> NodeState {
        let service_port = |name: &str, protocol, node_port| ServicePort {
            name: name.into(),
            node_port: Some(port(node_port)),
            target_port: TargetPort::Number(port(5353)),
            ..ServicePort::new(protocol, port(DNS))
        };
        let service = Service {
            kind: ServiceKind::NodePort,
            cluster_ips: vec![[10, 96, 0, 10].into()],
            ports: vec![service_port("tcp", Protocol::Tcp, 30054), service_port("udp", Protocol::Udp, 30053)],
            ..Service::new(ServiceName::new("default", "dns"))
        };
        let scopes = Scopes { internal: true, external: true, cluster: true };
        let endpoint = |n: &u8| Endpoint {
            v4: Some([10, 1, 0, *n].into()),
            local: true,
            ports: [0, 1].map(|index| EndpointPort { index, port: port(5353), scopes }).to_vec(),
            ..Endpoint::new(EndpointKey::Pod(format!("p{n}")))
        };
        let mut service = ServiceState::new(service, endpoints.iter().map(endpoint));
        service.other_serving =
            unselected.iter().map(|n| OtherServing { index: 1, target: backend(*n) }).collect();
        NodeState { services: [Arc::new(service)].into_iter().collect(), ..NodeState::default() }
    }

    fn backend(n: u8) -> SocketAddr {
        SocketAddr::from(([10, 1, 0, n], 5353))
    }

    fn addresses() -> [SocketAddr; 3] {
        ["10.96.0.10:53", "192.0.2.1:30053", "127.0.0.1:30053"].map(|it| it.parse().unwrap())
    }

    #[test]
    fn a_flow_has_a_place_while_its_endpoint_serves_the_address() {
        let flows = Flows::of(&state(&[1, 2], &[3]));
        for address in addresses() {
            assert!([1, 2, 3].iter().all(|n| flows.serves(address, backend(*n))), "{address}");
            assert!(!flows.serves(address, backend(4)));
        }
        assert!(!flows.serves("10.96.0.10:54".parse().unwrap(), backend(1)));
        assert!(!flows.serves("192.0.2.1:30054".parse().unwrap(), backend(1)), "that is TCP's");
        assert!(!Flows::of(&state(&[], &[])).serves(addresses()[0], backend(1)));
    }

    #[test]
    fn a_flow_stays_where_only_the_policy_of_its_address_has_changed() {
        let before = state(&[1], &[]);
        let mut service = ServiceState::clone(before.services.iter().next().unwrap().1);
        for port in &mut Arc::make_mut(&mut service.endpoints[0]).ports {
            port.scopes.internal = false;
        }
        let now = NodeState { services: [Arc::new(service)].into_iter().collect(), ..NodeState::default() };
        assert!(!lost(&before, &now));
        for address in addresses() {
            assert!(Flows::of(&now).serves(address, backend(1)), "{address}");
        }
    }

    #[test]
    fn a_flow_stays_where_only_the_ranges_have_changed_from_which_its_address_is_reached() {
        let with = |ranges: &[&str]| {
            let mut service = ServiceState::clone(state(&[1], &[]).services.iter().next().unwrap().1);
            let inner = Arc::make_mut(&mut service.service);
            inner.load_balancer_ips = vec![[203, 0, 113, 1].into()];
            inner.source_ranges = ranges.iter().map(|it| it.parse().unwrap()).collect();
            NodeState { services: [Arc::new(service)].into_iter().collect(), ..NodeState::default() }
        };
        let now = with(&["198.51.100.0/24"]);
        assert!(!lost(&with(&[]), &now));
        assert!(Flows::of(&now).serves("203.0.113.1:53".parse().unwrap(), backend(1)));
    }

    #[test]
    fn flows_are_lost_with_an_endpoint_and_not_with_its_selection() {
        let before = state(&[1, 2], &[]);
        assert!(!lost(&before, &before));
        assert!(!lost(&before, &state(&[1, 2, 3], &[])));
        assert!(!lost(&before, &state(&[1], &[2])), "it serves still, though nothing new is sent there");
        assert!(lost(&before, &state(&[1], &[])));
        assert!(lost(&state(&[1], &[2]), &state(&[1], &[])));
        assert!(lost(&before, &NodeState::default()));
        assert!(differ(&before, &state(&[1], &[2])) && !differ(&before, &before));
    }
}
