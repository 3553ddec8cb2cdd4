//! What is decided, and what it costs in look-ups, at a table of one frontend.

use std::cell;

use proptest::prelude::*;

use super::*;
use crate::net::V6;

/// The first cell of the frontend's service port.
const PORT: Cell = 40;
/// Where the frontend's backends are.
const FIRST: u32 = 100;
const REFUSED: Verdict<u32> = Verdict::Refuse { port: PORT };

fn cell_of(backend: u32) -> Cell {
    1000 + backend
}

/// What begins anew at a backend.
fn to(backend: u32) -> Verdict<u32> {
    Verdict::To(Led { backend, port: PORT, cell: cell_of(backend) })
}

/// A table of one frontend, `7:80`, with these backends.
struct One {
    protocol: u8,
    backends: &'static [u32],
    affinity: u32,
    /// How often something was looked up.
    lookups: cell::Cell<u32>,
}

impl One {
    fn new(protocol: u8, backends: &'static [u32], affinity: u32) -> Self {
        Self { protocol, backends, affinity, lookups: cell::Cell::new(0) }
    }

    fn row(&self, flags: u32) -> Frontend {
        Frontend {
            set: 1,
            count: self.backends.len() as u32,
            flags,
            affinity: self.affinity,
            service: 77,
            cell: PORT,
            first: FIRST,
            #[cfg(feature = "next-layout")]
            other_layout: 0,
        }
    }

    fn count(&self) {
        self.lookups.set(self.lookups.get() + 1);
    }
}

impl Tables for One {
    type Ip = u32;
    type Backend = u32;

    fn may_be_frontend(&self, ip: u32) -> bool {
        [7, 8].contains(&ip)
    }

    fn frontend(&self, ip: u32, port: Be16, protocol: u8) -> Option<Frontend> {
        assert!([7, 8].contains(&ip), "asked of addresses only that may be frontends");
        self.count();
        (ip == 7 && port == Be16::new(80) && protocol == self.protocol).then(|| self.row(0))
    }

    fn may_be_node_port(&self, port: Be16) -> bool {
        (30_000..=30_100).contains(&port.get())
    }

    fn node_port(&self, port: Be16, protocol: u8) -> Option<Frontend> {
        self.count();
        assert!(self.may_be_node_port(port), "asked of node ports only");
        let flags = if port.get() == 30_081 { OWN_ADDRESSES_ONLY } else { 0 };
        ([30_080, 30_081].contains(&port.get()) && protocol == self.protocol).then(|| self.row(flags))
    }

    fn place(&self, ip: u32) -> Option<Place> {
        self.count();
        [OWN, OTHER, LOOPBACK].into_iter().find(|it| *it == ip)
    }

    fn backend(&self, position: u32) -> Option<(u32, Cell)> {
        self.count();
        let slot = position.checked_sub(FIRST).expect("a position of the set");
        self.backends.get(slot as usize).map(|it| (*it, cell_of(*it)))
    }

    fn member(&self, _: u32, backend: u32) -> Option<Cell> {
        self.count();
        assert!(self.protocol == UDP || self.affinity != 0, "only such clients return to a backend");
        self.backends.contains(&backend).then(|| cell_of(backend))
    }

    const FAMILY: u32 = 4;

    fn backend_at(&self, address: Address) -> u32 {
        address.ip.raw()[3]
    }

    fn address_of(&self, backend: u32) -> Address {
        Address::new(V6::from_raw([0, 0, 0, backend]), Be16::new(80))
    }
}

#[derive(Default)]
struct Someone {
    random: u32,
    is_host: bool,
    client: u64,
    now: u64,
    kept: cell::Cell<Option<(AffinityKey, Affinity)>>,
    /// Where another connection of the same client is led while this one is being decided.
    meanwhile: Option<Address>,
    /// How often it was looked up.
    lookups: cell::Cell<u32>,
}

impl Caller for Someone {
    fn random(&self) -> u32 {
        self.random
    }

    fn is_host(&self) -> bool {
        self.is_host
    }

    fn client(&self) -> Client {
        Client::Namespace(self.client)
    }

    fn now(&self) -> u64 {
        self.now
    }

    fn affinity(&self, key: &AffinityKey) -> Affinity {
        self.lookups.set(self.lookups.get() + 1);
        self.kept.get().filter(|(kept, _)| kept == key).map_or_else(Affinity::default, |(_, it)| it)
    }

    fn keep_affinity(&self, key: &AffinityKey, last: &Affinity, affinity: &Affinity) -> Address {
        if let Some(other) = self.meanwhile {
            self.kept.set(Some((*key, Affinity { backend: other, ..*affinity })));
        }
        match self.kept.get() {
            Some((kept, it)) if kept == *key && it.used != last.used => it.backend,
            _ => {
                self.kept.set(Some((*key, *affinity)));
                affinity.backend
            }
        }
    }

    fn will_count(&self, port: Cell) {
        assert_eq!(port, PORT);
    }
}

#[track_caller]
fn check(protocol: u8, backends: &'static [u32], remembered: u32, random: u32, expect: Verdict<u32>) {
    let tables = One::new(protocol, backends, 0);
    let caller = Someone { random, ..Someone::default() };
    assert_eq!(decide(&tables, &caller, 7, Be16::new(80), protocol, remembered), expect);
}

#[test]
fn a_service_without_backends_refuses() {
    check(TCP, &[], 0, 0, REFUSED);
    check(UDP, &[], 10, 0, REFUSED);
}

#[test]
fn the_random_bits_choose_the_slot() {
    check(TCP, &[10, 11, 12], 0, 0, to(10));
    check(TCP, &[10, 11, 12], 0, u32::MAX / 2, to(11));
    check(TCP, &[10, 11, 12], 0, u32::MAX, to(12));
}

#[test]
fn a_remembered_backend_is_kept_while_it_is_a_member() {
    // It is the same conversation still, and was counted.
    check(UDP, &[10, 11, 12], 11, 0, Verdict::To(Led { backend: 11, port: PORT, cell: UNCOUNTED }));
    check(UDP, &[10, 12], 11, 0, to(10));
}

#[test]
fn a_client_keeps_its_backend_until_its_time_is_out_or_the_backend_is_gone() {
    const SECOND: u64 = 1_000_000_000;
    let (first, last) = (0, u32::MAX);
    let mut someone = Someone { now: SECOND, ..Someone::default() };
    let mut check = |random, later, backends, expect| {
        someone.random = random;
        someone.now += later;
        let tables = One::new(TCP, backends, 10);
        let verdict = decide(&tables, &someone, 7, Be16::new(80), TCP, 0);
        assert_eq!(verdict, to(expect));
    };
    check(first, 0, &[10, 11, 12], 10);
    check(last, 9 * SECOND, &[10, 11, 12], 10);
    // Each connection counts anew.
    check(last, 9 * SECOND, &[10, 11, 12], 10);
    check(last, 10 * SECOND, &[10, 11, 12], 12);
    check(first, 0, &[12, 10], 12);
    check(first, 0, &[10, 11], 10);
    someone.client = 1;
    someone.random = last;
    let tables = One::new(TCP, &[10, 11], 10);
    assert_eq!(decide(&tables, &someone, 7, Be16::new(80), TCP, 0), to(11));
}

#[test]
fn connections_of_a_new_client_that_come_at_once_go_to_one_backend() {
    let tables = One::new(TCP, &[10, 11, 12], 10);
    let at = |backend| Some(tables.address_of(backend));
    for (meanwhile, expect) in [(None, 10), (at(10), 10), (at(12), 12), (at(13), 10)] {
        let someone = Someone { now: 1, meanwhile, ..Someone::default() };
        assert_eq!(decide(&tables, &someone, 7, Be16::new(80), TCP, 0), to(expect), "{meanwhile:?}");
    }
}

#[test]
fn what_is_not_ours_passes() {
    let tables = One::new(TCP, &[10], 0);
    for (ip, port, protocol) in [(8, 80, TCP), (9, 80, TCP), (7, 81, TCP), (7, 80, UDP), (7, 80, 132)] {
        assert_eq!(decide(&tables, &Someone::default(), ip, Be16::new(port), protocol, 0), Verdict::Pass);
    }
}

#[track_caller]
fn check_node_port(is_host: bool, ip: u32, port: u16, expect: Verdict<u32>) {
    let (tables, caller) = (One::new(TCP, &[10], 0), Someone { is_host, ..Someone::default() });
    assert_eq!(decide(&tables, &caller, ip, Be16::new(port), TCP, 0), expect);
}

#[test]
fn a_node_port_is_served_at_the_nodes_addresses() {
    for ip in [OWN, OTHER] {
        check_node_port(false, ip, 30_080, to(10));
        check_node_port(false, ip, 30_082, Verdict::Pass);
    }
    check_node_port(false, 9, 30_080, Verdict::Pass);
}

#[test]
fn a_node_port_of_local_policy_is_left_to_other_nodes() {
    check_node_port(false, OWN, 30_081, to(10));
    check_node_port(false, OTHER, 30_081, Verdict::Pass);
}

#[test]
fn a_node_port_is_taken_where_it_is_served() {
    let tables = One::new(TCP, &[10], 0);
    for (ip, port, protocol, expect) in [
        (0, 30_080, TCP, true),
        (OWN, 30_080, TCP, true),
        (LOOPBACK, 30_081, TCP, true),
        (OTHER, 30_080, TCP, false),
        (9, 30_080, TCP, false),
        (0, 30_082, TCP, false),
        (0, 80, TCP, false),
        (0, 30_080, UDP, false),
    ] {
        let found = bound(&tables, ip, Be16::new(port), protocol).is_some();
        assert_eq!(found, expect, "{ip}:{port}, protocol {protocol}");
    }
}

#[test]
fn the_loopback_address_is_the_nodes_only_on_the_node() {
    check_node_port(true, LOOPBACK, 30_080, to(10));
    check_node_port(false, LOOPBACK, 30_080, Verdict::Pass);
}

#[test]
fn each_decision_costs_so_many_look_ups() {
    const NETWORK_OF_SERVICES: u32 = 8;
    const ELSEWHERE: u32 = 9;
    let someone = Someone { now: 3_600_000_000_000, ..Someone::default() };
    let check = |it: &One, ip, port, remembered, expect, lookups| {
        it.lookups.set(0);
        someone.lookups.set(0);
        let verdict = decide(it, &someone, ip, Be16::new(port), it.protocol, remembered);
        let counted = it.lookups.get() + someone.lookups.get();
        assert_eq!((verdict, counted), (expect, lookups), "{ip}:{port}");
    };
    let tcp = One::new(TCP, &[10, 11], 0);
    // What is nobody's: in a network without frontends, and in one with some.
    check(&tcp, ELSEWHERE, 80, 0, Verdict::Pass, 0);
    check(&tcp, NETWORK_OF_SERVICES, 80, 0, Verdict::Pass, 1);
    // The number lies among those of node ports, and it is one's.
    check(&tcp, ELSEWHERE, 30_082, 0, Verdict::Pass, 1);
    check(&tcp, ELSEWHERE, 30_080, 0, Verdict::Pass, 2);
    check(&tcp, NETWORK_OF_SERVICES, 30_082, 0, Verdict::Pass, 2);
    check(&tcp, NETWORK_OF_SERVICES, 30_080, 0, Verdict::Pass, 3);
    // A Service, and one without endpoints; a node port.
    check(&tcp, 7, 80, 0, to(10), 2);
    check(&One::new(TCP, &[], 0), 7, 80, 0, REFUSED, 1);
    check(&tcp, OWN, 30_080, 0, to(10), 3);
    // An unconnected UDP socket that returns to its backend, and one whose backend is gone.
    let udp = One::new(UDP, &[10, 11], 0);
    check(&udp, 7, 80, 0, to(10), 2);
    check(&udp, 7, 80, 11, Verdict::To(Led { backend: 11, port: PORT, cell: UNCOUNTED }), 2);
    check(&udp, 7, 80, 12, to(10), 3);
    // A client with affinity that is new, one that returns, and one whose backend is gone.
    let mut affine = One::new(TCP, &[10, 11], 60);
    check(&affine, 7, 80, 0, to(10), 3);
    check(&affine, 7, 80, 0, to(10), 3);
    affine.backends = &[11];
    check(&affine, 7, 80, 0, to(11), 4);
    // Of no other protocol anything is asked.
    check(&One::new(132, &[10], 0), 7, 80, 0, Verdict::Pass, 0);
}

proptest! {
    /// As when a program that does nothing else connects to a Service each time: with one number or every n-th.
    #[test]
    fn numbers_in_a_row_are_mixed_evenly(begin: u32, step in 1u64..64, seed: u64, count in 2u32..20) {
        const EACH: usize = 1000;
        let mut hits = vec![0_usize; count as usize];
        for n in 0..u64::from(count) * EACH as u64 {
            hits[scale(mix(u64::from(begin) + n * step, seed), count) as usize] += 1;
        }
        // Six standard deviations.
        prop_assert!(hits.iter().all(|it| it.abs_diff(EACH) < 190), "{hits:?}");
    }

    #[test]
    fn scaling_stays_in_range(random: u32, count in 1u32..) {
        prop_assert!(scale(random, count) < count);
    }

    #[test]
    fn scaling_reaches_every_slot(count in 1u32..1000) {
        let step = u32::MAX / count;
        let mut hit: Vec<u32> = (0..count).map(|n| scale(n * step + step / 2, count)).collect();
        hit.dedup();
        prop_assert_eq!(hit.len() as u32, count);
    }
}
