//! The protocol against maps in memory that watch over it, over random histories with failures and deaths.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    num::{NonZeroU16, NonZeroU32},
    sync::Arc,
};

use model::{
    Family, Protocol, ServiceName,
    state::{
        ClientIpAffinity, Endpoint, EndpointKey, EndpointPort, NodeState, Scope, Scopes, Service,
        ServicePort, ServiceState, TargetPort, TrafficPolicy,
    },
};
use proptest::prelude::*;
use proxy_common::tables::NodeAddrScope;

use super::*;
use crate::{
    compile::{FrontendAddress, Transport},
    fake_maps::Memory,
};

/// A Service `default/s<n>` at 10.96.0.at and fd00::at, port 80 TCP and 53 UDP, with these endpoints.
/// Every second one has load balancer IPs, every fourth of those with a source range for IPv4; every third one has external
/// IPs, one of which may be another's cluster IP; every fifth one has node ports. Not every endpoint is for all traffic.
fn service(n: u8, at: u8, endpoints: &[u8]) -> (ServiceName, Arc<ServiceState>) {
    let name = ServiceName::new("default", format!("s{n}"));
    let port = |name: &str, protocol, port| ServicePort {
        name: name.into(),
        node_port: n.is_multiple_of(5).then(|| NonZeroU16::new(30_000 + u16::from(n)).unwrap()),
        target_port: TargetPort::Number(NonZeroU16::new(8080).unwrap()),
        ..ServicePort::new(protocol, NonZeroU16::new(port).unwrap())
    };
    let scopes =
        |n: u8| Scopes { internal: !n.is_multiple_of(4), external: false, cluster: !n.is_multiple_of(5) };
    let endpoint = |n: &u8| Endpoint {
        v4: Some([10, 1, 0, *n].into()),
        // Every third pod has no v6 address.
        v6: (!n.is_multiple_of(3)).then(|| [0xfd01, 0, 0, 0, 0, 0, 0, u16::from(*n)].into()),
        local: true,
        ports: vec![
            EndpointPort { index: 0, port: NonZeroU16::new(8080).unwrap(), scopes: scopes(*n) },
            EndpointPort { index: 1, port: NonZeroU16::new(5353).unwrap(), scopes: scopes(*n) },
        ],
        ..Endpoint::new(EndpointKey::Pod(format!("p{n}")))
    };
    let service = Service {
        cluster_ips: vec![
            IpAddr::from([10, 96, 0, at]),
            IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(at)]),
        ],
        external_ips: if n.is_multiple_of(3) {
            vec![IpAddr::from([10, 96, 0, at % 8 + 1]), IpAddr::from([10, 201, 0, at])]
        } else {
            Vec::new()
        },
        load_balancer_ips: if n.is_multiple_of(2) {
            vec![IpAddr::from([10, 200, 0, at]), IpAddr::from([0xfd02, 0, 0, 0, 0, 0, 0, u16::from(at)])]
        } else {
            Vec::new()
        },
        ports: vec![port("http", Protocol::Tcp, 80), port("dns", Protocol::Udp, 53)],
        external_policy: if n.is_multiple_of(2) { TrafficPolicy::Local } else { TrafficPolicy::Cluster },
        affinity: n.is_multiple_of(7).then_some(ClientIpAffinity { timeout_seconds: NonZeroU32::MIN }),
        source_ranges: if n.is_multiple_of(8) { vec!["192.0.2.0/24".parse().unwrap()] } else { Vec::new() },
        ..Service::new(name.clone())
    };
    (name, Arc::new(ServiceState::new(service, endpoints.iter().map(endpoint))))
}

fn with_affinity(
    (name, mut state): (ServiceName, Arc<ServiceState>),
    has_affinity: bool,
) -> (ServiceName, Arc<ServiceState>) {
    let affinity = ClientIpAffinity { timeout_seconds: NonZeroU32::MIN };
    Arc::make_mut(&mut Arc::make_mut(&mut state).service).affinity = has_affinity.then_some(affinity);
    (name, state)
}

fn state(services: impl IntoIterator<Item = (ServiceName, Arc<ServiceState>)>) -> NodeState {
    NodeState { services: services.into_iter().collect(), ..NodeState::default() }
}

/// An address of this node for every Service, and one of another node.
fn places(state: &NodeState) -> Places {
    let own = state.services.values().map(|it| match it.service.cluster_ips[0] {
        IpAddr::V4(ip) => (IpAddr::from([192, 0, 2, ip.octets()[3]]), NodeAddrScope::LOCAL),
        IpAddr::V6(_) => unreachable!("the first cluster IP is a v4 one"),
    });
    own.chain([(IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]), NodeAddrScope::REMOTE)]).collect()
}

impl Plane<Memory> {
    fn take(&mut self, state: &NodeState) -> Result<Applied, Error> {
        self.apply(state, &places(state))
    }

    /// What is done when there is nothing more urgent.
    fn rest(&mut self) -> Result<(), Error> {
        self.settle()?;
        self.reclaim_counters()
    }
}

/// What a state means, said as plainly as possible: each address with its backends, and whether clients return to
/// them. Cluster IPs come before load balancer IPs, these before external IPs, and of one kind the first Service by name wins.
fn meaning(state: &NodeState) -> BTreeMap<FrontendAddress, (Vec<SocketAddr>, bool)> {
    let mut meaning = BTreeMap::new();
    let mut add = |state: &ServiceState, ip: IpAddr, scope| {
        for (index, port) in state.service.ports.iter().enumerate() {
            let transport = if port.protocol == Protocol::Tcp { Transport::Tcp } else { Transport::Udp };
            let number = if ip.is_unspecified() { port.node_port } else { Some(port.port) };
            let Some(number) = number else { continue };
            let address = SocketAddr::new(ip, number.get());
            let mut backends: Vec<_> = state.targets(index, Family::of(ip), scope).collect();
            backends.sort_unstable();
            let return_to = transport == Transport::Udp || state.service.affinity.is_some();
            meaning.entry(FrontendAddress { address, transport }).or_insert((backends, return_to));
        }
    };
    for it in state.services.values() {
        it.service.cluster_ips.iter().for_each(|ip| add(it, *ip, Scope::Internal));
    }
    for it in state.services.values() {
        let open = |ip: &&IpAddr| {
            !it.service.source_ranges.iter().any(|range| range.addr().is_ipv4() == ip.is_ipv4())
        };
        it.service.load_balancer_ips.iter().filter(open).for_each(|ip| add(it, *ip, Scope::Cluster));
    }
    for it in state.services.values() {
        it.service.external_ips.iter().for_each(|ip| add(it, *ip, Scope::Cluster));
    }
    for it in state.services.values() {
        for any in [IpAddr::from([0; 4]), IpAddr::from([0_u16; 8])] {
            add(it, any, Scope::Cluster);
        }
    }
    meaning
}

#[track_caller]
fn serves(memory: &Memory, state: &NodeState) {
    let meaning = meaning(state);
    for (frontend, (backends, return_to)) in &meaning {
        assert_eq!(memory.backends(*frontend).as_ref(), Some(backends), "behind {frontend}");
        for backend in backends {
            assert_eq!(memory.is_member(*frontend, *backend), *return_to);
        }
    }
    let count = |wanted: fn(&IpAddr) -> bool| meaning.keys().filter(|it| wanted(&it.address.ip())).count();
    let active = memory.active().unwrap();
    for (table, count) in [
        (Table::Frontends4, count(|it| it.is_ipv4() && !it.is_unspecified())),
        (Table::Frontends6, count(|it| it.is_ipv6() && !it.is_unspecified())),
        (Table::NodePorts, count(IpAddr::is_unspecified)),
        (Table::NodeAddrs, places(state).len()),
    ] {
        assert_eq!(memory.rows(active, table), count as u32, "no other entry is in {table}");
    }
    for (address, place) in places(state) {
        assert_eq!(memory.node_addr_scope(address), Some(place), "{address}");
    }
}

/// Nothing is left over: each table has exactly the rows the layout counts, on both sides.
#[track_caller]
fn is_clean(plane: &Plane<Memory>) {
    for side in Side::BOTH {
        for table in Table::ALL {
            assert_eq!(plane.store.rows(side, table), plane.layout.rows(table), "{table} of side {side}");
        }
        // (One whom another Service keeps from its address has cells and no row.)
        assert!(plane.store.owned().is_superset(&plane.store.cells(side)), "every cell has an owner");
    }
}

#[test]
fn an_empty_state_is_a_generation_too() {
    let mut plane = Plane::new(Memory::new(1)).unwrap();
    assert!(plane.take(&NodeState::default()).unwrap().flipped);
    serves(&plane.store, &NodeState::default());
}

#[test]
fn an_equal_state_changes_nothing() {
    let mut plane = Plane::new(Memory::new(1)).unwrap();
    plane.take(&state([service(1, 1, &[1, 2])])).unwrap();
    // Equal, but not the same pointers.
    let again = plane.take(&state([service(1, 1, &[1, 2])])).unwrap();
    assert_eq!(again, Applied::default());
}

#[test]
fn counters_last_as_long_as_their_names() {
    let mut plane = Plane::new(Memory::new(1)).unwrap();
    let (one, both) = (state([service(1, 1, &[1, 2])]), state([service(1, 1, &[2, 3]), service(2, 2, &[1])]));
    plane.take(&one).unwrap();
    plane.rest().unwrap();
    let cells = |plane: &Plane<Memory>| plane.store.cells(plane.store.active().unwrap());
    let first = cells(&plane);
    assert_eq!(plane.store.owned(), first);
    // Another process, and further generations.
    plane = Plane::new(plane.store).unwrap();
    plane.take(&both).unwrap();
    plane.rest().unwrap();
    assert_eq!(plane.store.owned(), cells(&plane), "what is gone is released");
    // p1 is gone from both ports and families; the rest of the first Service counts on where it did.
    assert_eq!(cells(&plane).intersection(&first).count(), first.len() - 4);
    plane.take(&NodeState::default()).unwrap();
    plane.rest().unwrap();
    assert!(plane.store.owned().is_empty());
}

#[test]
fn counters_wait_for_the_programs_of_before() {
    let mut plane = Plane::new(Memory::new(1)).unwrap();
    plane.take(&state([service(1, 1, &[1])])).unwrap();
    plane.take(&NodeState::default()).unwrap();
    plane.settle().unwrap();
    // The new programs came only now, as when they could not be attached at first.
    plane.programs_changed();
    plane.reclaim_counters().unwrap();
    assert!(!plane.store.owned().is_empty(), "a program of before may still count there");
    plane.rest().unwrap();
    assert!(plane.store.owned().is_empty());
}

#[test]
fn affinity_can_begin_and_end_while_the_service_lives() {
    let mut plane = Plane::new(Memory::new(1)).unwrap();
    let with = |affinity| {
        let (name, mut it) = service(1, 1, &[1, 2]);
        let mut service = it.service.as_ref().clone();
        service.affinity = affinity;
        Arc::make_mut(&mut it).service = Arc::new(service);
        state([(name, it)])
    };
    let affinity = Some(ClientIpAffinity { timeout_seconds: NonZeroU32::MIN });
    for state in [with(None), with(affinity), with(None)] {
        plane.take(&state).unwrap();
        serves(&plane.store, &state);
    }
}

#[test]
fn a_change_costs_what_it_touches() {
    let many: Vec<_> = (1..=200).map(|n| service(n, n, &[1, 2, 3])).collect();
    let mut plane = Plane::new(Memory::new(1)).unwrap();
    plane.take(&state(many.clone())).unwrap();
    plane.settle().unwrap();
    let mut one_less = many;
    one_less[7] = service(8, 8, &[1, 3]);
    let applied = plane.take(&state(one_less)).unwrap();
    // In each family and port, for inside traffic and for the load balancer's: a frontend's count, the last slot, perhaps
    // the gap, and the UDP member.
    assert!(applied.entries <= 28, "{applied:?}");
    assert_eq!(applied.services, 1);
}

#[test]
fn affinity_comes_and_goes_while_the_endpoints_stay() {
    let mut plane = Plane::new(Memory::new(1)).unwrap();
    for (has_affinity, endpoints) in [
        (false, &[1, 2, 3][..]),
        (true, &[1, 2, 3]),
        (false, &[1, 2, 3]),
        (true, &[2, 3, 6]),
        (false, &[3, 6, 9]),
    ] {
        let state = state([with_affinity(service(1, 1, endpoints), has_affinity)]);
        plane.take(&state).unwrap();
        serves(&plane.store, &state);
        plane.settle().unwrap();
        is_clean(&plane);
    }
}

#[test]
fn maps_grow_with_the_state() {
    let mut plane = Plane::new(Memory::new(1)).unwrap();
    for n in 1..=250 {
        plane.take(&state((1..=n).map(|n| service(n, n, &[n, 251, 252])))).unwrap();
    }
    serves(&plane.store, &state((1..=250).map(|n| service(n, n, &[n, 251, 252]))));
    plane.rest().unwrap();
    is_clean(&plane);
}

#[test]
fn the_first_of_two_clashing_services_wins_and_the_other_is_named() {
    let mut plane = Plane::new(Memory::new(1)).unwrap();
    let clash = state([service(1, 9, &[1]), service(2, 9, &[2])]);
    plane.take(&clash).unwrap();
    serves(&plane.store, &clash);
    let rejected = plane.rejected();
    assert_eq!(rejected.len(), 4);
    assert_eq!(rejected[0].item, "default/s2 cluster IP 10.96.0.9:53/UDP");
    assert_eq!(rejected[0].reason, "it is default/s1's cluster IP already; give one of them another");
    // The loser takes over when the winner goes.
    let alone = state([service(2, 9, &[2])]);
    plane.take(&alone).unwrap();
    serves(&plane.store, &alone);
    assert_eq!(plane.rejected(), []);
}

#[test]
fn an_external_ip_cannot_take_a_cluster_ip_away() {
    // s3 comes before s9, and names its cluster IP an external IP of its own.
    let state = state([service(3, 8, &[3]), service(9, 1, &[9])]);
    let mut plane = Plane::new(Memory::new(1)).unwrap();
    plane.take(&state).unwrap();
    serves(&plane.store, &state);
    let reasons: Vec<_> = plane.rejected().iter().map(ToString::to_string).collect();
    assert_eq!(
        reasons,
        [
            "default/s3 external IP 10.96.0.1:53/UDP: it is default/s9's cluster IP already; give one of them another",
            "default/s3 external IP 10.96.0.1:80/TCP: it is default/s9's cluster IP already; give one of them another",
        ]
    );
}

#[test]
fn a_failed_apply_leaves_the_old_generation_serving() {
    let (old, new) = (state([service(1, 1, &[1, 2, 3])]), state([service(1, 1, &[4]), service(2, 2, &[5])]));
    for seed in 1..200 {
        let mut plane = Plane::new(Memory::new(seed)).unwrap();
        plane.take(&old).unwrap();
        plane.store.fails_one_in = 4;
        let result = plane.take(&new);
        serves(&plane.store, if result.is_ok() { &new } else { &old });
        plane.store.fails_one_in = 0;
        plane.take(&new).unwrap();
        serves(&plane.store, &new);
        plane.rest().unwrap();
        is_clean(&plane);
    }
}

/// Some Services out of a few, each at its own address or one that it shares, with some endpoints out of many.
fn any_state() -> impl Strategy<Value = NodeState> {
    let endpoints = proptest::collection::btree_set(1u8..60, 0..40);
    let one = (1u8..8, 1u8..8, endpoints, any::<bool>()).prop_map(|(n, at, endpoints, has_affinity)| {
        with_affinity(service(n, at, &endpoints.into_iter().collect::<Vec<_>>()), has_affinity)
    });
    proptest::collection::vec(one, 0..8).prop_map(state)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever was before, whatever failed and whoever died, the active side means the last state that was applied.
    #[test]
    fn any_history_means_its_last_state(
        history in proptest::collection::vec((any_state(), any::<bool>(), any::<bool>()), 1..12),
        fails_one_in in prop_oneof![Just(0u32), 5u32..40],
        seed: u32,
    ) {
        let mut plane = Plane::new(Memory::new(seed)).unwrap();
        let mut serving = None;
        for (state, dies, settles) in history {
            plane.store.fails_one_in = fails_one_in;
            if dies {
                // Only the maps outlive the process.
                plane = Plane::new(plane.store.clone()).unwrap();
            }
            match plane.take(&state) {
                Ok(_) => serving = Some(state),
                Err(_) => prop_assert!(fails_one_in != 0),
            }
            if let Some(state) = &serving {
                serves(&plane.store, state);
            }
            if settles {
                let _ = plane.rest();
            }
        }
        plane.store.fails_one_in = 0;
        if let Some(state) = serving {
            plane.take(&state).unwrap();
            plane.rest().unwrap();
            serves(&plane.store, &state);
            is_clean(&plane);
        }
    }
}
