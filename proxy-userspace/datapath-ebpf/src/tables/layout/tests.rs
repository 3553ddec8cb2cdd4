//! What a layout says of itself, beside the tables, which the tests of the double buffer check.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use model::{
    Protocol,
    state::{EndpointPort, Service, ServicePort, ServiceState},
};
use proptest::{
    collection::{btree_map, btree_set, vec},
    prelude::*,
};
use proxy_common::tables::{FrontendOptions, NodeAddrScope};

use super::*;
use crate::fixtures::{self, ALL_SCOPES, number, state_of};

/// A Service at this address, with a node port, and an endpoint.
fn service(name: &str, ip: IpAddr, node_port: u16) -> Arc<ServiceState> {
    let port =
        ServicePort { node_port: Some(number(node_port)), ..fixtures::port("http", Protocol::Tcp, 80) };
    let to = EndpointPort { index: 0, port: number(8080), scopes: ALL_SCOPES };
    let endpoint =
        fixtures::endpoint(1, Some([10, 1, 0, 1].into()), Some([0xfd01, 0, 0, 0, 0, 0, 0, 1].into()), [to]);
    Arc::new(ServiceState::new(fixtures::service(name, [ip], vec![port]), [endpoint]))
}

fn update(layout: &mut Layout, services: &[&Arc<ServiceState>]) {
    layout.update(&state_of(services.iter().map(|it| Arc::clone(it))), &NodeAddresses::default());
}

#[test]
fn the_prefilter_has_the_networks_and_node_ports_in_use() {
    let v6 = |n| IpAddr::from([0xfd00, 0, 0, 1, 0, 0, 0, n]);
    let a = service("a", [10, 96, 0, 1].into(), 30_001);
    // In the network of the first one, in another one, and twice in one of IPv6.
    let others = [
        service("b", [10, 96, 0, 2].into(), 30_005),
        service("c", [10, 97, 0, 1].into(), 30_009),
        service("d", v6(1), 30_003),
        service("e", v6(2), 30_007),
    ];
    let [b, c, d, e] = &others;
    let mut layout = Layout::default();
    let mut check = |services: &[&Arc<ServiceState>], ports: [u16; 2], [v4, v6]: [&[IpAddr]; 2]| {
        update(&mut layout, services);
        let Prefilter { node_ports, networks4, networks6, .. } = layout.prefilter();
        assert_eq!([node_ports.min, node_ports.max], ports);
        for (all, found) in [(v4, networks4), (v6, networks6)] {
            let in_use: BTreeSet<_> = all.iter().map(|it| network(*it)).collect();
            assert!((0..=Network::MAX).all(|it| found.contains(it) == in_use.contains(&it)), "{all:?}");
        }
    };
    let (one, two) = ([10, 96, 0, 1].into(), [10, 97, 0, 1].into());
    check(&[&a, b, c, d, e], [30_001, 30_009], [&[one, two], &[v6(1)]]);
    check(&[&a, b, c, e], [30_001, 30_009], [&[one, two], &[v6(1)]]);
    check(&[b, c], [30_005, 30_009], [&[one, two], &[]]);
    check(&[&a, b], [30_001, 30_005], [&[one], &[]]);
    check(&[&a], [30_001, 30_001], [&[one], &[]]);
    let none = PortRange::EMPTY;
    check(&[], [none.min, none.max], [&[], &[]]);
}

#[test]
fn services_and_what_is_rejected_of_them_are_known_while_they_are_there() {
    let good = service("good", [10, 96, 0, 1].into(), 30_001);
    let bad = service("bad", [127, 0, 0, 1].into(), 30_002);
    let mut layout = Layout::default();
    for (services, rejected) in [(&[&good, &bad][..], 1), (&[&good], 0), (&[&bad], 1), (&[], 0)] {
        update(&mut layout, services);
        assert_eq!((layout.services(), layout.rejected().len()), (services.len(), rejected));
        assert!(
            layout
                .rejected()
                .iter()
                .all(|it| it.item.contains("default/bad") && it.item.contains("127.0.0.1"))
        );
        assert_eq!(layout.is_empty(), services.is_empty());
    }
}

#[test]
fn ejected_endpoints_are_named_by_the_counters_of_their_connections() {
    let ports =
        ["http", "admin"].map(|it| fixtures::port(it, Protocol::Tcp, if it == "http" { 80 } else { 81 }));
    let to = |index, port| EndpointPort { index, port: number(port), scopes: ALL_SCOPES };
    let endpoint =
        |n| fixtures::endpoint(n, Some([10, 1, 0, n as u8].into()), None, [to(0, 8080), to(1, 8081)]);
    let web: Service = fixtures::service("web", [[10, 96, 0, 1].into()], ports.to_vec());
    let mut layout = Layout { passive_health: Some(fixtures::passive_health(1, 40)), ..Layout::default() };
    update(&mut layout, &[&Arc::new(ServiceState::new(web, [endpoint(1), endpoint(2)]))]);
    let slot = |layout: &Layout, at: &str| {
        let at: SocketAddr = at.parse().unwrap();
        let slots = layout.sets().flat_map(|it| &it.slots);
        slots.filter(|it| it.backend() == at).map(|it| it.counter).next().unwrap()
    };
    let (one, two) = (slot(&layout, "10.1.0.2:8081"), slot(&layout, "10.1.0.1:8080"));
    let avoiders = HashMap::from([
        (one, EjectingClients { clients: 3, has_node: true }),
        (two, EjectingClients { clients: 1, has_node: false }),
    ]);
    let ejected = |port: &str, endpoint: &str, clients, has_node| EjectedEndpoint {
        service: ServiceName::new("default", "web"),
        port: port.into(),
        endpoint: endpoint.parse().unwrap(),
        clients,
        has_node,
        max_ejected_percent: 40,
    };
    let expect = [ejected("admin", "10.1.0.2:8081", 3, true), ejected("http", "10.1.0.1:8080", 1, false)];
    assert_eq!(layout.ejected(&avoiders), expect);
    assert_eq!(layout.ejected(&HashMap::new()), []);
}

/// A Service whose endpoints may be addresses of Services: external IPs, restricted load balancer IPs, node ports.
#[derive(Clone, Debug)]
struct AnyService {
    has_external_ip: bool,
    has_restricted_ip: bool,
    has_node_port: bool,
    /// Each with the last byte of its address and its port.
    endpoints: BTreeSet<(u8, u16)>,
}

impl AnyService {
    fn any() -> impl Strategy<Value = Self> {
        let address = prop_oneof![1u8..4, 11u8..14, 21u8..24];
        let endpoints = btree_set((address, prop_oneof![Just(80u16), 30_001u16..30_004]), 0..4);
        (any::<[bool; 3]>(), endpoints).prop_map(|(has, endpoints)| Self {
            has_external_ip: has[0],
            has_restricted_ip: has[1],
            has_node_port: has[2],
            endpoints,
        })
    }

    fn state(&self, n: u8) -> ServiceState {
        let node_port = self.has_node_port.then(|| number(30_000 + u16::from(n)));
        let port = ServicePort { node_port, ..fixtures::port("http", Protocol::Tcp, 80) };
        let mut service = fixtures::service(&format!("s{n}"), [[10, 96, 0, n].into()], vec![port]);
        service.external_ips.extend(self.has_external_ip.then(|| IpAddr::V4(address(n))));
        service.load_balancer_ips.extend(self.has_restricted_ip.then(|| IpAddr::V4(address(10 + n))));
        service.source_ranges.push("192.0.2.0/24".parse().unwrap());
        let endpoints = self.endpoints.iter().zip(1..).map(|(&(n, port), key)| {
            let to = EndpointPort { index: 0, port: number(port), scopes: ALL_SCOPES };
            fixtures::endpoint(key, Some(address(n)), None, [to])
        });
        ServiceState::new(service, endpoints)
    }
}

fn address(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 1, 0, n)
}

fn options(layout: &Layout) -> BTreeMap<FrontendAddress, FrontendOptions> {
    layout.frontends.iter().map(|(at, it)| (*at, it.options)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_left_to_packets_follows_from_the_last_state_alone(
        history in vec(
            (btree_map(1u8..4, AnyService::any(), 0..4), btree_set((21u8..24, any::<bool>()), 0..3)),
            1..8,
        ),
    ) {
        let mut layout = Layout::default();
        for (services, nodes) in history {
            let state = state_of(services.iter().map(|(n, it)| Arc::new(it.state(*n))));
            let scope = |is_own| if is_own { NodeAddrScope::LOCAL } else { NodeAddrScope::REMOTE };
            let nodes: NodeAddresses =
                BTreeMap::from_iter(nodes.iter().map(|(n, is_own)| (address(*n).into(), scope(*is_own)))).into();
            layout.update(&state, &nodes);
            let mut fresh = Layout::default();
            fresh.update(&state, &nodes);
            prop_assert_eq!(options(&layout), options(&fresh));
            for (n, it) in &services {
                let is_entry_point = |&(at, port): &(u8, u16)| services.iter().any(|(n, of)| {
                    let is_own_node = nodes.get(&address(at).into()) == Some(&NodeAddrScope::LOCAL);
                    of.has_external_ip && (at, port) == (*n, 80)
                        || of.has_restricted_ip && (at, port) == (10 + n, 80)
                        || of.has_node_port && is_own_node && port == 30_000 + u16::from(*n)
                });
                let cluster_ip = SocketAddr::new([10, 96, 0, *n].into(), 80);
                let at = FrontendAddress { address: cluster_ip, protocol: Protocol::Tcp };
                let expected = it.endpoints.iter().any(is_entry_point);
                prop_assert_eq!(options(&layout)[&at].is_to_packets(), expected, "s{}", n);
            }
        }
    }
}
