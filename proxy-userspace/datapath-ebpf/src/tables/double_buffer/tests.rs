//! The double buffer with maps in memory that check its invariants, over random histories with failures and restarts.

mod by_scenario;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    num::{NonZeroU8, NonZeroU32},
    sync::Arc,
};

use datapath::{FrontendAddress, PassiveHealthOptions, unspecified};
use model::{
    Family, Protocol, ServiceMetadata,
    conflicts::{Claim, FrontendOwners, remove_conflicting},
    state::{
        ClientIpAffinity, EndpointPort, NodeState, PassiveHealth, Scope, Scopes, Service, ServicePort,
        ServiceState, TrafficPolicy,
    },
};
use proptest::prelude::*;
use proxy_common::tables::NodeAddrScope;

use super::*;
use crate::{
    fake_maps::FakeMaps,
    fixtures::{self, ALL_SCOPES, state_of},
};

const AFFINITY: ClientIpAffinity = ClientIpAffinity { timeout_seconds: NonZeroU32::MIN };

/// A Service `default/s<n>` at 10.96.0.at and fd00::at, port 80 TCP and 53 UDP, with these endpoints.
/// Every second one has load balancer IPs, every fourth of those with a source range for IPv4; every third one has external
/// IPs, one of which may be another's cluster IP; every fifth one has node ports. Not every endpoint is for all scopes.
fn service(n: u8, at: u8, endpoints: &[u8]) -> Arc<ServiceState> {
    let port = |name, protocol, number| ServicePort {
        node_port: n.is_multiple_of(5).then(|| fixtures::number(30_000 + u16::from(n))),
        ..fixtures::port(name, protocol, number)
    };
    let scopes =
        |n: u8| Scopes { internal: !n.is_multiple_of(4), external: false, cluster: !n.is_multiple_of(5) };
    let endpoint = |n: &u8| {
        // Every third pod has no v6 address.
        let v6 = (!n.is_multiple_of(3)).then(|| [0xfd01, 0, 0, 0, 0, 0, 0, u16::from(*n)].into());
        let port = |index, port| EndpointPort { index, port: fixtures::number(port), scopes: scopes(*n) };
        fixtures::endpoint((*n).into(), Some([10, 1, 0, *n].into()), v6, [port(0, 8080), port(1, 5353)])
    };
    let v4 = |a, b| IpAddr::from([10, a, 0, b]);
    let v6 = |a| IpAddr::from([a, 0, 0, 0, 0, 0, 0, u16::from(at)]);
    let if_multiple = |of, ips: [IpAddr; 2]| if n.is_multiple_of(of) { ips.to_vec() } else { Vec::new() };
    let ports = vec![port("http", Protocol::Tcp, 80), port("dns", Protocol::Udp, 53)];
    let service = Service {
        external_ips: if_multiple(3, [v4(96, at % 8 + 1), v4(201, at)]),
        load_balancer_ips: if_multiple(2, [v4(200, at), v6(0xfd02)]),
        external_policy: if n.is_multiple_of(2) { TrafficPolicy::Local } else { TrafficPolicy::Cluster },
        affinity: n.is_multiple_of(7).then_some(AFFINITY),
        source_ranges: if n.is_multiple_of(8) { vec!["192.0.2.0/24".parse().unwrap()] } else { Vec::new() },
        ..fixtures::service(&format!("s{n}"), [v4(96, at), v6(0xfd00)], ports)
    };
    Arc::new(ServiceState::new(service, endpoints.iter().map(endpoint)))
}

fn with_affinity(mut state: Arc<ServiceState>, has_affinity: bool) -> Arc<ServiceState> {
    Arc::make_mut(&mut Arc::make_mut(&mut state).service).affinity = has_affinity.then_some(AFFINITY);
    state
}

/// A state of these Services. As datapaths get it, it has no conflicts.
fn state(services: impl IntoIterator<Item = Arc<ServiceState>>) -> NodeState {
    let services = state_of(services).services;
    let mut owners = FrontendOwners::default();
    for it in services.values() {
        owners.set(&it.service.name, Claim::new(&it.service, None));
    }
    state_of(services.values().map(|it| {
        let mut it = Arc::clone(it);
        if let Some(conflicting) = owners.conflicting(&it.service.name.clone()) {
            remove_conflicting(Arc::make_mut(&mut Arc::make_mut(&mut it).service), conflicting);
        }
        it
    }))
}

fn tcp(ip: impl Into<IpAddr>, port: u16) -> FrontendAddress {
    FrontendAddress { address: SocketAddr::new(ip.into(), port), protocol: Protocol::Tcp }
}

/// An address of this node for every Service, and one of another node.
fn node_addresses(state: &NodeState) -> NodeAddresses {
    let own = state.services.values().map(|it| match it.service.cluster_ips[0] {
        IpAddr::V4(ip) => (IpAddr::from([192, 0, 2, ip.octets()[3]]), NodeAddrScope::LOCAL),
        IpAddr::V6(_) => unreachable!("the first cluster IP is a v4 one"),
    });
    Arc::new(own.chain([(IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]), NodeAddrScope::REMOTE)]).collect())
}

impl DoubleBuffer<FakeMaps> {
    fn take(&mut self, state: &NodeState) -> Result<ApplyReport, Error> {
        self.apply(state, &node_addresses(state))
    }

    /// What is done when nothing is more urgent.
    fn finish(&mut self) -> Result<(), Error> {
        self.finish_generation()?;
        // What is removed is freed by the second call.
        self.reclaim_counters()?;
        self.reclaim_counters()
    }
}

/// A naive model of a state: each frontend with its backends, and whether clients return to them.
fn expected(state: &NodeState) -> BTreeMap<FrontendAddress, (Vec<SocketAddr>, bool)> {
    let mut expected = BTreeMap::new();
    let mut add = |state: &ServiceState, ip: IpAddr, scope| {
        for (index, port) in state.service.ports.iter().enumerate() {
            let number = if ip.is_unspecified() { port.node_port } else { Some(port.port) };
            let Some(number) = number.filter(|_| !port.conflicting_addresses.contains(&ip)) else { continue };
            let address = SocketAddr::new(ip, number.get());
            let mut backends: Vec<_> = state.targets(index, Family::of(ip), scope).collect();
            backends.sort_unstable();
            let return_to = port.protocol == Protocol::Udp || state.service.affinity.is_some();
            let frontend = FrontendAddress { address, protocol: port.protocol };
            assert_eq!(expected.insert(frontend, (backends, return_to)), None, "{frontend} has one Service");
        }
    };
    for it in state.services.values() {
        let Service { cluster_ips, load_balancer_ips, external_ips, source_ranges, .. } = &*it.service;
        let open = |ip: &&IpAddr| !source_ranges.iter().any(|range| range.addr().is_ipv4() == ip.is_ipv4());
        cluster_ips.iter().for_each(|ip| add(it, *ip, Scope::Internal));
        cluster_ips.iter().for_each(|ip| add(it, unspecified(Family::of(*ip)), Scope::Cluster));
        load_balancer_ips.iter().filter(open).for_each(|ip| add(it, *ip, Scope::Cluster));
        external_ips.iter().for_each(|ip| add(it, *ip, Scope::Cluster));
    }
    expected
}

#[track_caller]
fn assert_serves(maps: &FakeMaps, state: &NodeState) {
    let expected = expected(state);
    for (frontend, (backends, return_to)) in &expected {
        assert_eq!(maps.backends(*frontend).as_ref(), Some(backends), "{frontend}");
        for backend in backends {
            assert_eq!(maps.is_member(*frontend, *backend), *return_to);
        }
    }
    let count = |wanted: fn(&IpAddr) -> bool| expected.keys().filter(|it| wanted(&it.address.ip())).count();
    let active = maps.active().unwrap();
    for (table, count) in [
        (Table::Frontends4, count(|it| it.is_ipv4() && !it.is_unspecified())),
        (Table::Frontends6, count(|it| it.is_ipv6() && !it.is_unspecified())),
        (Table::NodePorts, count(IpAddr::is_unspecified)),
        (Table::NodeAddrs, node_addresses(state).len()),
    ] {
        assert_eq!(maps.rows(active, table), count as u32, "{table} has no other entries");
    }
    for (address, scope) in node_addresses(state).iter() {
        assert_eq!(maps.node_addr_scope(*address), Some(*scope), "{address}");
    }
}

/// Both sides have exactly the entries that the layout counts, and exactly the counters that entries refer to have an owner.
#[track_caller]
fn assert_clean(buffer: &DoubleBuffer<FakeMaps>) {
    for side in Side::BOTH {
        for table in Table::ALL {
            assert_eq!(buffer.store.rows(side, table), buffer.layout.rows(table), "{table} of side {side}");
        }
        assert_eq!(buffer.store.counters(side), buffer.store.owned_counters());
    }
}

#[test]
fn an_empty_state_is_a_generation_too() {
    let mut buffer = DoubleBuffer::new(FakeMaps::new(1)).unwrap();
    assert!(buffer.take(&NodeState::default()).unwrap().flipped);
    assert_serves(&buffer.store, &NodeState::default());
}

#[test]
fn an_equal_state_changes_nothing() {
    let mut buffer = DoubleBuffer::new(FakeMaps::new(1)).unwrap();
    buffer.take(&state([service(1, 1, &[1, 2])])).unwrap();
    // Equal, but not the same pointers.
    let again = buffer.take(&state([service(1, 1, &[1, 2])])).unwrap();
    assert_eq!(again, ApplyReport::default());
}

#[test]
fn a_change_of_a_label_writes_no_map() {
    let mut buffer = DoubleBuffer::new(FakeMaps::new(1)).unwrap();
    let before = service(5, 1, &[1, 2]);
    buffer.take(&state([Arc::clone(&before)])).unwrap();
    let metadata = ServiceMetadata { labels: [("app".into(), "web".into())].into(), ..Default::default() };
    let service = Service { metadata: Some(Arc::new(metadata)), ..(*before.service).clone() };
    let after = ServiceState { service: Arc::new(service), ..(*before).clone() };
    assert_ne!(*before, after);
    let applied = buffer.take(&state([Arc::new(after)])).unwrap();
    assert_eq!(applied, ApplyReport { changed_services: 1, ..ApplyReport::default() });
}

#[test]
fn counters_live_as_long_as_their_service_ports() {
    let mut buffer = DoubleBuffer::new(FakeMaps::new(1)).unwrap();
    let (one, both) = (state([service(1, 1, &[1, 2])]), state([service(1, 1, &[2, 3]), service(2, 2, &[1])]));
    buffer.take(&one).unwrap();
    buffer.finish().unwrap();
    let counters = |buffer: &DoubleBuffer<FakeMaps>| buffer.store.counters(buffer.store.active().unwrap());
    let first = counters(&buffer);
    assert_eq!(buffer.store.owned_counters(), first);
    // Another process, and further generations.
    buffer = DoubleBuffer::new(buffer.store).unwrap();
    buffer.take(&both).unwrap();
    buffer.finish().unwrap();
    assert_eq!(buffer.store.owned_counters(), counters(&buffer), "those of removed backends are free");
    // p1 was removed from both ports and families; everything else of the first Service keeps its counters.
    assert_eq!(counters(&buffer).intersection(&first).count(), first.len() - 4);
    buffer.take(&NodeState::default()).unwrap();
    buffer.finish().unwrap();
    assert!(buffer.store.owned_counters().is_empty());
}

#[test]
fn counters_are_not_reclaimed_while_old_programs_may_run() {
    let mut buffer = DoubleBuffer::new(FakeMaps::new(1)).unwrap();
    buffer.take(&state([service(1, 1, &[1])])).unwrap();
    buffer.take(&NodeState::default()).unwrap();
    buffer.finish_generation().unwrap();
    // The new programs were attached only now, as after a failed attempt.
    buffer.programs_changed();
    buffer.reclaim_counters().unwrap();
    assert!(!buffer.store.owned_counters().is_empty(), "an old program may still increment them");
    buffer.finish().unwrap();
    assert!(buffer.store.owned_counters().is_empty());
}

#[test]
fn a_change_costs_what_it_touches() {
    let many: Vec<_> = (1..=200).map(|n| service(n, n, &[1, 2, 3])).collect();
    let mut buffer = DoubleBuffer::new(FakeMaps::new(1)).unwrap();
    buffer.take(&state(many.clone())).unwrap();
    buffer.finish_generation().unwrap();
    let mut one_less = many;
    one_less[7] = service(8, 8, &[1, 3]);
    let applied = buffer.take(&state(one_less)).unwrap();
    // In each family and port, for the cluster IP and the load balancer IP: a frontend's count, the last slot, perhaps the
    // gap, and the UDP member.
    assert!(applied.entries <= 28, "{applied:?}");
    assert_eq!(applied.changed_services, 1);
}

#[test]
fn a_change_costs_its_own_size_in_a_large_service_too() {
    let of = |endpoints: std::ops::Range<u32>| {
        let ports = vec![fixtures::port("http", Protocol::Tcp, 80), fixtures::port("dns", Protocol::Udp, 53)];
        let to = [0, 1].map(|index| EndpointPort { index, port: fixtures::number(8080), scopes: ALL_SCOPES });
        let endpoint = |n: u32| fixtures::endpoint(n, Some(Ipv4Addr::from(0x0b00_0000 + n)), None, to);
        let service = fixtures::service("web", [[10, 96, 0, 1].into()], ports);
        state_of([ServiceState::new(service, endpoints.map(endpoint))])
    };
    let mut buffer = DoubleBuffer::new(FakeMaps::new(1)).unwrap();
    buffer.take(&of(1000..2000)).unwrap();
    buffer.finish_generation().unwrap();
    let applied = buffer.take(&of(1001..2000)).unwrap();
    // Of each port the frontend's count, the last slot and the gap that it fills, and the UDP member.
    assert!(applied.entries <= 7, "{applied:?}");
    assert_serves(&buffer.store, &of(1001..2000));
}

#[test]
fn endpoints_are_ejected_as_their_service_says_else_as_the_node_says() {
    let with_health = |n, passive_health| {
        let mut state = service(n, n, &[1, 2]);
        let service = Arc::make_mut(&mut Arc::make_mut(&mut state).service);
        service.load_balancing.passive_health = passive_health;
        state
    };
    let number = |it| NonZeroU8::new(it).unwrap();
    let services = [
        PassiveHealth::default(),
        PassiveHealth { failures: Some(number(7)), ..PassiveHealth::default() },
        PassiveHealth { max_ejected_percent: Some(number(20)), ..PassiveHealth::default() },
        PassiveHealth { enabled: Some(false), ..PassiveHealth::default() },
        PassiveHealth { enabled: Some(true), ..PassiveHealth::default() },
    ];
    let numbers = 1..=services.len() as u8;
    let state = state(numbers.clone().zip(services).map(|(n, it)| with_health(n, it)));
    let found = |options: Option<PassiveHealthOptions>| {
        let mut buffer = DoubleBuffer::new(FakeMaps::new(1)).unwrap();
        buffer.layout.passive_health = options;
        buffer.take(&state).unwrap();
        let health = |n| buffer.store.health(tcp([10, 96, 0, n], 80)).unwrap();
        numbers.clone().map(health).map(|it| (it.failures, it.max_ejected)).collect::<Vec<_>>()
    };
    let options = fixtures::passive_health(4, 60);
    const NEVER: (u8, u8) = (0, 0);
    assert_eq!(found(Some(options)), [(4, 60), (7, 60), (4, 20), NEVER, (4, 60)]);
    let disabled = PassiveHealthOptions { enabled: false, ..options };
    assert_eq!(found(Some(disabled)), [NEVER, NEVER, NEVER, NEVER, (4, 60)]);
    assert_eq!(found(None), [NEVER; 5]);
}

#[test]
fn an_address_with_source_ranges_is_left_to_the_packet_path_whatever_else_it_is() {
    let serves = |ranges: &[&str], ip: [u8; 4]| {
        let service = Service {
            load_balancer_ips: vec![IpAddr::from([203, 0, 113, 1])],
            external_ips: vec![IpAddr::from([203, 0, 113, 1]), IpAddr::from([203, 0, 113, 2])],
            source_ranges: ranges.iter().map(|it| it.parse().unwrap()).collect(),
            ..fixtures::service("web", [[10, 96, 0, 1].into()], vec![fixtures::port("", Protocol::Tcp, 80)])
        };
        let mut buffer = DoubleBuffer::new(FakeMaps::new(1)).unwrap();
        buffer.take(&state([Arc::new(ServiceState::new(service, []))])).unwrap();
        buffer.store.backends(tcp(ip, 80)).is_some()
    };
    let (both, external) = ([203, 0, 113, 1], [203, 0, 113, 2]);
    assert!(!serves(&["192.0.2.0/24"], both) && serves(&["192.0.2.0/24"], external));
    // Those of the other family restrict nothing.
    assert!(serves(&["2001:db8::/32"], both) && serves(&[], both));
    // Nor does one of everyone.
    assert!(serves(&["0.0.0.0/0"], both) && serves(&["192.0.2.0/24", "0.0.0.0/0"], both));
    assert!(!serves(&["192.0.2.0/24", "::/0"], both));
}

#[test]
fn a_cluster_ip_on_an_interface_of_the_host_is_left_to_it() {
    let mut buffer = DoubleBuffer::new(FakeMaps::new(1)).unwrap();
    let state = state([service(1, 1, &[1]), service(2, 2, &[1])]);
    let serves = |buffer: &DoubleBuffer<FakeMaps>| {
        [1, 2].map(|n| buffer.store.backends(tcp([10, 96, 0, n], 80)).is_some())
    };
    buffer.layout.set_host_addresses([IpAddr::from([10, 96, 0, 2])].into());
    buffer.take(&state).unwrap();
    assert_eq!(serves(&buffer), [true, false]);
    // Only the Services that it concerns are compiled again.
    buffer.layout.set_host_addresses([IpAddr::from([10, 96, 0, 2]), [192, 0, 2, 1].into()].into());
    assert_eq!(buffer.take(&state).unwrap(), ApplyReport::default());
    buffer.layout.set_host_addresses([IpAddr::from([10, 96, 0, 1]), [10, 96, 0, 2].into()].into());
    assert_eq!(buffer.take(&state).unwrap().changed_services, 1);
    assert_eq!((serves(&buffer), buffer.layout.left_to_host.len()), ([false, false], 2));
    buffer.layout.set_host_addresses(BTreeSet::new());
    assert_eq!(buffer.take(&state).unwrap().changed_services, 2);
    assert_serves(&buffer.store, &state);
    assert!(buffer.layout.left_to_host.is_empty());
    buffer.finish().unwrap();
    assert_clean(&buffer);
}

#[test]
fn maps_grow_with_the_state() {
    let mut buffer = DoubleBuffer::new(FakeMaps::new(1)).unwrap();
    for n in 1..=250 {
        buffer.take(&state((1..=n).map(|n| service(n, n, &[n, 251, 252])))).unwrap();
    }
    assert_serves(&buffer.store, &state((1..=250).map(|n| service(n, n, &[n, 251, 252]))));
    buffer.finish().unwrap();
    assert_clean(&buffer);
}

/// The spare side before it becomes active, the other side afterwards.
#[test]
fn maps_shrink_at_a_start() {
    let many = state((1..=250).map(|n| service(n, n, &[n])));
    let few = state([service(1, 1, &[1])]);
    let mut buffer = DoubleBuffer::new(FakeMaps::new(1)).unwrap();
    for it in [&many, &few] {
        buffer.take(it).unwrap();
        buffer.finish().unwrap();
    }
    let capacities = |buffer: &DoubleBuffer<FakeMaps>| {
        Side::BOTH.map(|side| buffer.store.capacity(side, Table::Frontends4))
    };
    assert!(capacities(&buffer).iter().all(|it| *it > 250), "{:?}", capacities(&buffer));
    // Another process.
    buffer = DoubleBuffer::new(buffer.store).unwrap();
    buffer.take(&few).unwrap();
    buffer.finish().unwrap();
    assert_eq!(capacities(&buffer), [64; 2]);
    assert_serves(&buffer.store, &few);
    assert_clean(&buffer);
}

/// As a state of another brain may have it.
#[test]
fn a_port_or_an_endpoint_that_appears_twice_is_served_once() {
    let ports = ["http", "again"].map(|it| fixtures::port(it, Protocol::Tcp, 80));
    let service = fixtures::service("web", [[10, 96, 0, 1].into()], ports.to_vec());
    let pod = Ipv4Addr::new(10, 1, 0, 1);
    // Twice, of a family that the Service does not have, and without an address.
    let addresses = [(Some(pod), None), (Some(pod), None), (None, Some(Ipv6Addr::LOCALHOST)), (None, None)];
    let to = EndpointPort { index: 0, port: fixtures::number(8080), scopes: ALL_SCOPES };
    let endpoints = (1..).zip(addresses).map(|(n, (v4, v6))| fixtures::endpoint(n, v4, v6, [to]));
    let mut buffer = DoubleBuffer::new(FakeMaps::new(1)).unwrap();
    buffer.take(&state_of([ServiceState::new(service, endpoints)])).unwrap();
    buffer.finish().unwrap();
    let served = buffer.store.backends(tcp([10, 96, 0, 1], 80));
    assert_eq!(served, Some(vec![SocketAddr::new(pod.into(), 8080)]));
    assert_eq!(buffer.layout.rejected().len(), 1);
    assert_clean(&buffer);
}

#[test]
fn a_failed_apply_leaves_the_old_generation_serving() {
    let (old, new) = (state([service(1, 1, &[1, 2, 3])]), state([service(1, 1, &[4]), service(2, 2, &[5])]));
    for seed in 1..200 {
        let mut buffer = DoubleBuffer::new(FakeMaps::new(seed)).unwrap();
        buffer.take(&old).unwrap();
        buffer.store.fails_one_in = 4;
        let result = buffer.take(&new);
        assert_serves(&buffer.store, if result.is_ok() { &new } else { &old });
        buffer.store.fails_one_in = 0;
        buffer.take(&new).unwrap();
        assert_serves(&buffer.store, &new);
        buffer.finish().unwrap();
        assert_clean(&buffer);
    }
}

/// Some of a few Services, each at an address of its own or a shared one, with some of many endpoints.
fn any_state() -> impl Strategy<Value = NodeState> {
    let endpoints = proptest::collection::btree_set(1u8..60, 0..40);
    let one = (1u8..8, 1u8..8, endpoints, any::<bool>()).prop_map(|(n, at, endpoints, has_affinity)| {
        with_affinity(service(n, at, &endpoints.into_iter().collect::<Vec<_>>()), has_affinity)
    });
    proptest::collection::vec(one, 0..8).prop_map(state)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// After any history with failures and restarts, the active side contains the last state that was applied.
    #[test]
    fn any_history_means_its_last_state(
        history in proptest::collection::vec((any_state(), any::<bool>(), any::<bool>()), 1..12),
        fails_one_in in prop_oneof![Just(0u32), 5u32..40],
        seed: u32,
    ) {
        let mut buffer = DoubleBuffer::new(FakeMaps::new(seed)).unwrap();
        let mut serving = None;
        for (state, restarts, finishes) in history {
            buffer.store.fails_one_in = fails_one_in;
            if restarts {
                // Only the maps survive.
                buffer = DoubleBuffer::new(buffer.store.clone()).unwrap();
            }
            match buffer.take(&state) {
                Ok(_) => serving = Some(state),
                Err(_) => prop_assert!(fails_one_in != 0),
            }
            if let Some(state) = &serving {
                assert_serves(&buffer.store, state);
            }
            if finishes {
                let _ = buffer.finish();
            }
        }
        buffer.store.fails_one_in = 0;
        if let Some(state) = serving {
            buffer.take(&state).unwrap();
            buffer.finish().unwrap();
            assert_serves(&buffer.store, &state);
            assert_clean(&buffer);
        }
    }
}
