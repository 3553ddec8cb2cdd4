//! Decisions, and how many look-ups they cost, on tables with one frontend.

mod ejection;
mod node_ports;

use std::cell::Cell;

use super::*;
use crate::{
    choice::{
        choose,
        tests::{CLIENT, States},
    },
    net::V4,
    random::mix,
    tables::{Backend4, FrontendOptions, HealthPolicy, PortRange, network4},
};

/// The first counter of the frontend's service port.
const PORT: CounterIndex = 40;
/// The position of the frontend's first backend.
const OFFSET: u32 = 100;
/// The last bytes of node addresses.
const LOCAL: u32 = NodeAddrScope::LOCAL.0;
const REMOTE: u32 = NodeAddrScope::REMOTE.0;
const LOOPBACK: u32 = NodeAddrScope::LOOPBACK.0;
const INTERFACE: u32 = NodeAddrScope::INTERFACE.0;
const REFUSED: Verdict = Verdict::Refuse { port_counter: PORT };

fn counter_of(backend: u32) -> CounterIndex {
    1000 + backend
}

/// Each number is an address in a network of its own; 0 is the unspecified one.
fn ip(n: u32) -> V4 {
    V4::from_raw(n.to_le())
}

fn backend(n: u32) -> SockAddr {
    if n == 0 { SockAddr::UNSET } else { SockAddr::new(ip(n).mapped(), Be16::new(80)) }
}

fn to(n: u32) -> Verdict {
    to_watched(n, Watch::new(counter_of(n), HealthPolicy::default(), false))
}

fn to_watched(n: u32, watch: Watch) -> Verdict {
    let backend_counter = counter_of(n);
    Verdict::Redirect(Selection { backend: backend(n), port_counter: PORT, backend_counter, watch })
}

/// A datagram to the same backend as the one before, which is not counted again.
fn again_to(n: u32) -> Verdict {
    let (backend, watch) = (backend(n), Watch::NONE);
    Verdict::Redirect(Selection { backend, port_counter: PORT, backend_counter: NO_COUNTER, watch })
}

/// Tables with one frontend, `7:80`, with these backends.
struct OneFrontend {
    protocol: u8,
    backends: &'static [u32],
    /// Its options are not those of node ports.
    frontend: Frontend,
    states: States,
    prefilter: Box<Prefilter>,
    lookups: Cell<u32>,
}

impl OneFrontend {
    fn new(protocol: u8, backends: &'static [u32], affinity_timeout: u32) -> Self {
        let mut prefilter = Box::new(Prefilter::EMPTY);
        prefilter.node_ports = PortRange { min: 30_000, max: 30_100 };
        [7, 8].into_iter().for_each(|it| prefilter.networks4.insert(network4(ip(it))));
        let frontend = Frontend {
            set: 1,
            affinity_timeout,
            service_port: 77,
            counter: PORT,
            backend_offset: OFFSET,
            ..Frontend::default()
        };
        let (states, lookups) = (States::default(), Cell::default());
        Self { protocol, backends, frontend, states, prefilter, lookups }
    }

    fn value(&self, options: FrontendOptions) -> Frontend {
        Frontend { options, backend_count: self.backends.len() as u32, ..self.frontend }
    }

    fn eject(&mut self, backends: &[u32], until: u64) {
        self.states.ejected = backends.iter().map(|it| (counter_of(*it), until)).collect();
    }
}

impl Tables for OneFrontend {
    type Ip = V4;

    fn side(&self) -> u32 {
        0
    }

    fn prefilter(&self) -> Option<&Prefilter> {
        Some(&self.prefilter)
    }

    fn frontend(&self, address: V4, port: Be16, protocol: u8) -> Option<Frontend> {
        assert!([ip(7), ip(8)].contains(&address), "only looked up if the prefilter matches");
        self.lookups.update(|it| it + 1);
        (address == ip(7) && port == Be16::new(80) && protocol == self.protocol)
            .then(|| self.value(self.frontend.options))
    }

    fn node_port(&self, port: Be16, protocol: u8) -> Option<Frontend> {
        self.lookups.update(|it| it + 1);
        assert!((30_000..=30_100).contains(&port.get()), "only looked up if the prefilter matches");
        let options = FrontendOptions::new(port.get() == 30_081, false, 0).external();
        let options = if self.frontend.options.is_to_packets() { options.to_packets() } else { options };
        ([30_080, 30_081].contains(&port.get()) && protocol == self.protocol).then(|| self.value(options))
    }

    fn node_addr_scope(&self, address: V4) -> Option<NodeAddrScope> {
        self.lookups.update(|it| it + 1);
        if address.is_loopback() {
            return Some(NodeAddrScope::LOOPBACK);
        }
        (LOCAL..=INTERFACE).find(|it| ip(*it) == address).map(NodeAddrScope)
    }

    fn backend(&self, position: u32) -> Option<(Backend4, CounterIndex)> {
        self.lookups.update(|it| it + 1);
        let slot = position.checked_sub(OFFSET).expect("a position of the set");
        self.backends.get(slot as usize).map(|it| (V4::backend_at(backend(*it)), counter_of(*it)))
    }

    fn member(&self, _: u32, member: Backend4) -> Option<CounterIndex> {
        self.lookups.update(|it| it + 1);
        assert!(
            self.protocol == UDP || self.frontend.affinity_timeout != 0,
            "only then is there a backend to return to"
        );
        let found = self.backends.iter().find(|it| V4::sock_addr(member) == backend(**it));
        found.map(|it| counter_of(*it))
    }

    fn choose(&self, choice: Choice, first: CounterIndex) -> u32 {
        let counter_at = |position| Some(self.backend(position)?.1);
        choose(counter_at, &self.states, choice, first)
    }
}

#[derive(Default)]
struct FakeSocket {
    is_excluded: bool,
    packets_serve: bool,
    heard: Option<SockAddr>,
    has_chosen_interface: bool,
    has_chosen_port: bool,
    previous: Cell<SockAddr>,
    random: u32,
    is_host: bool,
    client: u64,
    bound: V6,
    now: u64,
    entry: Cell<Option<(AffinityKey, AffinityEntry)>>,
    /// The backend of a concurrent connection of the same client.
    concurrent: Option<SockAddr>,
    lookups: Cell<u32>,
}

impl SocketOrigin for &FakeSocket {
    fn has_chosen_interface(&self, _: u8) -> bool {
        self.has_chosen_interface
    }

    fn has_chosen_port(&self) -> bool {
        self.has_chosen_port
    }

    fn bound_address(&self) -> V6 {
        self.bound
    }

    fn is_in_host_netns(&self) -> bool {
        self.is_host
    }
}

impl SocketContext for FakeSocket {
    fn origin(&self) -> impl SocketOrigin {
        self
    }

    fn is_excluded(&self) -> bool {
        self.is_excluded
    }

    fn previous_backend(&self) -> SockAddr {
        self.previous.get()
    }

    fn packets_serve(&self) -> bool {
        self.packets_serve
    }

    fn has_just_heard(&self, peer: &SockAddr) -> bool {
        self.heard == Some(*peer)
    }

    fn is_reached_by_packets_only<T: Tables>(&self, tables: &T, protocol: u8, to_loopback: bool) -> bool {
        only_packets_reach(tables, &self.origin(), protocol, to_loopback)
    }

    fn random(&self) -> u32 {
        self.random
    }

    fn netns(&self) -> u64 {
        self.client
    }

    fn now(&self) -> u64 {
        self.now
    }

    fn affinity(&self, key: &AffinityKey) -> AffinityEntry {
        self.lookups.update(|it| it + 1);
        self.entry.get().filter(|(stored, _)| stored == key).map_or_else(AffinityEntry::default, |(_, it)| it)
    }

    fn update_affinity(&self, key: &AffinityKey, last: &AffinityEntry, entry: &AffinityEntry) -> SockAddr {
        if let Some(other) = self.concurrent {
            self.entry.set(Some((*key, AffinityEntry { backend: other, ..*entry })));
        }
        match self.entry.get() {
            Some((stored, it)) if stored == *key && it.used != last.used => it.backend,
            _ => {
                self.entry.set(Some((*key, *entry)));
                entry.backend
            }
        }
    }

    fn uses_backend_states(&self, frontend: &Frontend) -> bool {
        frontend.health.failures != 0
    }

    fn prefetch_socket(&self) {}

    fn prefetch_counters(&self, port_counter: CounterIndex) {
        assert_eq!(port_counter, PORT);
    }
}

/// The verdict on `address:port`, over the protocol of the frontend.
fn verdict(tables: &OneFrontend, socket: &FakeSocket, address: u32, port: u16, previous: u32) -> Verdict {
    socket.previous.set(backend(previous));
    decide(tables, socket, ip(address), Be16::new(port), tables.protocol)
}

const LEFT: Verdict = Verdict::Leave { counter: PORT + LEFT_TO_PACKETS };

/// The verdict on the frontend where the packet path serves, and where it does not.
#[track_caller]
fn check_with_packets(tables: &OneFrontend, mut socket: FakeSocket, serve: Verdict, otherwise: Verdict) {
    for (packets_serve, expect) in [(true, serve), (false, otherwise)] {
        socket.packets_serve = packets_serve;
        assert_eq!(verdict(tables, &socket, 7, 80, 0), expect, "packets serve: {packets_serve}");
    }
}

#[test]
fn udp_to_a_service_without_backends_is_left_to_packets() {
    let [tcp, udp] = [TCP, UDP].map(|it| OneFrontend::new(it, &[], 0));
    check_with_packets(&tcp, FakeSocket::default(), REFUSED, REFUSED);
    let left = Verdict::Leave { counter: PORT + NO_BACKEND };
    check_with_packets(&udp, FakeSocket::default(), left, REFUSED);
}

#[test]
fn a_socket_whose_program_has_chosen_its_source_or_way_is_left_to_packets() {
    let [tcp, udp] = [TCP, UDP].map(|it| OneFrontend::new(it, &[10], 0));
    let interface = || FakeSocket { has_chosen_interface: true, ..FakeSocket::default() };
    let port = || FakeSocket { has_chosen_port: true, ..FakeSocket::default() };
    check_with_packets(&tcp, interface(), LEFT, to(10));
    check_with_packets(&udp, interface(), LEFT, to(10));
    check_with_packets(&tcp, port(), LEFT, to(10));
    // A UDP socket can be connected to one backend twice, and servers send from their port.
    check_with_packets(&udp, port(), to(10), to(10));
    for (is_host, address, is_left) in [
        (true, LOCAL, false),
        (true, INTERFACE, true),
        (true, LOOPBACK, true),
        (true, 9, true),
        // A pod's own address, whatever the node has.
        (false, 9, false),
        (false, INTERFACE, false),
    ] {
        let bound = || FakeSocket { is_host, bound: ip(address).mapped(), ..FakeSocket::default() };
        for tables in [&tcp, &udp] {
            check_with_packets(tables, bound(), if is_left { LEFT } else { to(10) }, to(10));
        }
    }
}

#[test]
fn a_frontend_may_be_left_to_packets() {
    let mut tables = OneFrontend::new(TCP, &[10], 0);
    tables.frontend.options = FrontendOptions::new(false, false, 0).to_packets();
    check_with_packets(&tables, FakeSocket::default(), LEFT, to(10));
}

/// The packet path translates nothing there.
#[test]
fn a_node_port_on_loopback_is_left_to_packets_only_by_clients_bound_to_loopback() {
    let port = Be16::new(30_080);
    for protocol in [TCP, UDP] {
        let mut tables = OneFrontend::new(protocol, &[10], 0);
        tables.frontend.options = tables.frontend.options.to_packets();
        let host = || FakeSocket { is_host: true, packets_serve: true, ..FakeSocket::default() };
        let bound = |to: V4| FakeSocket { bound: to.mapped(), ..host() };
        for (socket, expect) in [
            (FakeSocket { has_chosen_port: true, has_chosen_interface: true, ..host() }, to(10)),
            (bound(ip(INTERFACE)), to(10)),
            (bound(V4::LOOPBACK), LEFT),
        ] {
            assert_eq!(decide(&tables, &socket, V4::LOOPBACK, port, protocol), expect);
        }
    }
}

#[test]
fn a_datagram_to_a_sender_is_a_reply_unless_the_address_is_a_cluster_ip() {
    let heard = |address, port| FakeSocket {
        heard: Some(SockAddr::new(ip(address).mapped(), Be16::new(port))),
        ..FakeSocket::default()
    };
    let mut tables = OneFrontend::new(UDP, &[10], 0);
    assert_eq!(verdict(&tables, &heard(7, 80), 7, 80, 0), to(10));
    tables.frontend.options = tables.frontend.options.external();
    assert_eq!(verdict(&tables, &heard(7, 80), 7, 80, 0), Verdict::Pass);
    assert_eq!(verdict(&tables, &heard(7, 81), 7, 80, 0), to(10));
    assert_eq!(verdict(&tables, &heard(LOCAL, 30_080), LOCAL, 30_080, 0), Verdict::Pass);
    assert_eq!(verdict(&tables, &heard(REMOTE, 30_080), LOCAL, 30_080, 0), to(10));
    // Nor where there is no backend.
    tables.backends = &[];
    assert_eq!(verdict(&tables, &heard(7, 80), 7, 80, 0), Verdict::Pass);
    // A connection is no reply.
    tables.protocol = TCP;
    tables.backends = &[10];
    assert_eq!(verdict(&tables, &heard(7, 80), 7, 80, 0), to(10));
}

#[test]
fn only_senders_at_frontends_that_are_no_cluster_ips_are_kept() {
    let mut tables = OneFrontend::new(UDP, &[10], 0);
    let check = |tables: &OneFrontend, address, port, is_host, expect| {
        let found = may_be_hijacked(tables, ip(address), Be16::new(port), || is_host);
        assert_eq!(found, expect, "{address}:{port}");
    };
    check(&tables, 7, 80, false, false);
    tables.frontend.options = tables.frontend.options.external();
    check(&tables, 7, 80, false, true);
    check(&tables, 7, 81, false, false);
    check(&tables, INTERFACE, 30_080, false, true);
    check(&tables, REMOTE, 30_080, false, true);
    check(&tables, REMOTE, 30_081, false, false);
    check(&tables, LOOPBACK, 30_080, true, true);
    check(&tables, LOOPBACK, 30_080, false, false);
    check(&tables, 9, 40_000, false, false);
    assert_eq!(tables.lookups.take(), 2 + 1 + 2 * 5, "a sender elsewhere costs no look-up");
}

#[test]
fn the_random_bits_choose_the_slot() {
    let tables = OneFrontend::new(TCP, &[10, 11, 12], 0);
    for (random, expect) in [(0, 10), (u32::MAX / 2, 11), (u32::MAX, 12)] {
        let socket = FakeSocket { random, ..FakeSocket::default() };
        assert_eq!(verdict(&tables, &socket, 7, 80, 0), to(expect));
    }
}

#[test]
fn a_client_keeps_its_backend_until_the_timeout_or_until_the_backend_is_removed() {
    const SECOND: u64 = 1_000_000_000;
    let (first, last) = (0, u32::MAX);
    let mut socket = FakeSocket { now: SECOND, ..FakeSocket::default() };
    let mut check = |random, later, backends, expect| {
        socket.random = random;
        socket.now += later;
        let tables = OneFrontend::new(TCP, backends, 10);
        assert_eq!(verdict(&tables, &socket, 7, 80, 0), to(expect));
    };
    check(first, 0, &[10, 11, 12], 10);
    check(last, 9 * SECOND, &[10, 11, 12], 10);
    // Each connection restarts the timeout.
    check(last, 9 * SECOND, &[10, 11, 12], 10);
    check(last, 10 * SECOND, &[10, 11, 12], 12);
    check(first, 0, &[12, 10], 12);
    check(first, 0, &[10, 11], 10);
    socket.client = 1;
    socket.random = last;
    let tables = OneFrontend::new(TCP, &[10, 11], 10);
    assert_eq!(verdict(&tables, &socket, 7, 80, 0), to(11));
}

/// Anybody may bind any address: only one of the node's own, on the node, is a client of its own.
#[test]
fn a_bound_address_is_a_client_only_if_it_is_the_nodes() {
    let tables = OneFrontend::new(TCP, &[10, 20], 10);
    let client_of = |is_host, bound: u32| {
        let socket =
            FakeSocket { is_host, client: 5, bound: ip(bound).mapped(), now: 1, ..FakeSocket::default() };
        verdict(&tables, &socket, 7, 80, 0);
        socket.entry.get().unwrap().0.is_address != 0
    };
    assert!(client_of(true, LOCAL));
    for (is_host, bound) in [(false, LOCAL), (true, REMOTE), (true, LOOPBACK), (true, 99)] {
        assert!(!client_of(is_host, bound), "{is_host} {bound}");
    }
}

#[test]
fn concurrent_connections_of_a_new_client_go_to_one_backend() {
    let tables = OneFrontend::new(TCP, &[10, 11, 12], 10);
    let at = |n| Some(backend(n));
    for (concurrent, expect) in [(None, 10), (at(10), 10), (at(12), 12), (at(13), 10)] {
        let socket = FakeSocket { now: 1, concurrent, ..FakeSocket::default() };
        assert_eq!(verdict(&tables, &socket, 7, 80, 0), to(expect), "{concurrent:?}");
    }
}

#[test]
fn unmatched_destinations_pass() {
    let tables = OneFrontend::new(TCP, &[10], 0);
    for (address, port, protocol) in [(8, 80, TCP), (9, 80, TCP), (7, 81, TCP), (7, 80, UDP), (7, 80, 132)] {
        assert_eq!(
            decide(&tables, &FakeSocket::default(), ip(address), Be16::new(port), protocol),
            Verdict::Pass
        );
    }
}

#[test]
fn the_probe_address_is_redirected_even_for_excluded_processes() {
    let tables = OneFrontend::new(TCP, &[10], 0);
    let socket = FakeSocket { is_excluded: true, ..FakeSocket::default() };
    assert_eq!(verdict(&tables, &socket, 7, 80, 0), Verdict::Pass);
    for (protocol, is_redirected) in [(TCP, true), (UDP, true), (132, false)] {
        let verdict = decide(&tables, &socket, V4::PROBE, Be16::new(80), protocol);
        let loopback = SockAddr::new(V4::LOOPBACK.mapped(), Be16::new(80));
        let selection = Selection {
            backend: loopback,
            port_counter: NO_COUNTER,
            backend_counter: NO_COUNTER,
            watch: Watch::NONE,
        };
        assert_eq!(verdict, if is_redirected { Verdict::Redirect(selection) } else { Verdict::Pass });
    }
}

#[test]
fn each_decision_costs_a_fixed_number_of_look_ups() {
    const NETWORK_OF_SERVICES: u32 = 8;
    const ELSEWHERE: u32 = 9;
    let socket = FakeSocket { now: 3_600_000_000_000, ..FakeSocket::default() };
    let check = |it: &OneFrontend, address, port, previous, expect, lookups| {
        it.lookups.set(0);
        socket.lookups.set(0);
        let verdict = verdict(it, &socket, address, port, previous);
        let counted = it.lookups.get() + socket.lookups.get();
        assert_eq!((verdict, counted), (expect, lookups), "{address}:{port}");
    };
    let tcp = OneFrontend::new(TCP, &[10, 11], 0);
    // Unmatched destinations: in a network without frontends, and in one with some.
    check(&tcp, ELSEWHERE, 80, 0, Verdict::Pass, 0);
    check(&tcp, NETWORK_OF_SERVICES, 80, 0, Verdict::Pass, 1);
    // A port between the lowest and the highest node port, and a node port elsewhere.
    check(&tcp, ELSEWHERE, 30_082, 0, Verdict::Pass, 1);
    check(&tcp, ELSEWHERE, 30_080, 0, Verdict::Pass, 2);
    check(&tcp, NETWORK_OF_SERVICES, 30_082, 0, Verdict::Pass, 2);
    check(&tcp, NETWORK_OF_SERVICES, 30_080, 0, Verdict::Pass, 3);
    // A Service, and one without endpoints; a node port.
    check(&tcp, 7, 80, 0, to(10), 2);
    check(&OneFrontend::new(TCP, &[], 0), 7, 80, 0, REFUSED, 1);
    check(&OneFrontend::new(UDP, &[], 0), 7, 80, 10, REFUSED, 1);
    check(&tcp, LOCAL, 30_080, 0, to(10), 3);
    // An unconnected UDP socket: new, returning to its backend, and after its backend was removed.
    let udp = OneFrontend::new(UDP, &[10, 11], 0);
    check(&udp, 7, 80, 0, to(10), 2);
    check(&udp, 7, 80, 11, again_to(11), 2);
    check(&udp, 7, 80, 12, to(10), 3);
    // A client with session affinity: new, returning, and after its backend was removed.
    let mut sticky = OneFrontend::new(TCP, &[10, 11], 60);
    check(&sticky, 7, 80, 0, to(10), 3);
    check(&sticky, 7, 80, 0, to(10), 3);
    sticky.backends = &[11];
    check(&sticky, 7, 80, 0, to(11), 4);
    // Other protocols cost no look-up.
    check(&OneFrontend::new(132, &[10], 0), 7, 80, 0, Verdict::Pass, 0);
}
