//! Any history of what a socket remembers, in a table of the test's own: what is known of it, and that it leaves nothing.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
};

use proptest::prelude::*;

use super::*;
use crate::{
    net::{Be16, V4, V6},
    socket::DATAGRAM_SLOTS,
};

/// A table with room for so many entries.
struct Table {
    room: usize,
    entries: RefCell<BTreeMap<PeerKey, Peer>>,
    /// How many entries ever came, and how many were told to have gone.
    came: Cell<u64>,
    gone: Cell<u64>,
}

impl Table {
    fn new(room: usize) -> Self {
        Self { room, entries: RefCell::default(), came: Cell::default(), gone: Cell::default() }
    }

    /// How many there are, which is what is counted.
    fn len(&self) -> usize {
        let number = self.entries.borrow().len();
        assert_eq!(self.came.get() - self.gone.get(), number as u64);
        number
    }
}

/// The table as one socket sees it.
struct View<'a> {
    table: &'a Table,
    cookie: u64,
    is_released: bool,
}

impl Peers for View<'_> {
    fn cookie(&self) -> u64 {
        self.cookie
    }

    fn is_released(&self) -> bool {
        self.is_released
    }

    fn get(&self, key: &PeerKey) -> Option<Peer> {
        self.table.entries.borrow().get(key).copied()
    }

    fn update(&self, key: &PeerKey, change: impl FnOnce(&mut Peer)) -> bool {
        self.table.entries.borrow_mut().get_mut(key).map(change).is_some()
    }

    fn add(&self, key: &PeerKey, peer: &Peer) -> bool {
        let mut entries = self.table.entries.borrow_mut();
        assert!(!entries.contains_key(key), "only what is not there is added");
        let has_room = entries.len() < self.table.room;
        if has_room {
            entries.insert(*key, *peer);
            self.table.came.update(|it| it + 1);
        }
        has_room
    }

    fn take(&self, key: &PeerKey) -> u64 {
        self.table.entries.borrow_mut().remove(key).map_or(0, |_| 1)
    }

    fn gone(&self, entries: u64) {
        self.table.gone.update(|it| it + entries);
    }
}

fn address(n: u32) -> Address {
    Address::new(V6::from_raw([1, 2, 3, n]), Be16::new(53))
}

fn translation(service: u32, backend: u32) -> Translation {
    Translation { service: address(service), backend: address(backend) }
}

/// One socket and the table.
struct Socket<'a> {
    datagrams: Datagrams,
    view: View<'a>,
}

impl<'a> Socket<'a> {
    fn new(table: &'a Table, cookie: u64) -> Self {
        Self { datagrams: Datagrams::default(), view: View { table, cookie, is_released: true } }
    }

    fn remember(&mut self, service: u32, backend: u32) -> bool {
        remember(&mut self.datagrams, &self.view, translation(service, backend))
    }

    fn backend_of(&self, service: u32) -> Address {
        backend_of(&self.datagrams, &self.view, &address(service))
    }

    fn service_of(&self, backend: u32) -> Address {
        service_of(&self.datagrams, &self.view, &address(backend))
    }

    fn release(&self) -> bool {
        release(&self.view)
    }
}

#[test]
fn a_socket_remembers_any_number_of_addresses() {
    let table = Table::new(usize::MAX);
    let mut sockets = [1, 2].map(|cookie| Socket::new(&table, cookie));
    for n in 0..100 {
        assert!(sockets.iter_mut().all(|it| it.remember(n, 1000 + n)));
    }
    for n in 0..100 {
        assert!(sockets.iter().all(|it| it.backend_of(n) == address(1000 + n)));
        assert!(sockets.iter().all(|it| it.service_of(1000 + n) == address(n)));
    }
    assert!(sockets[0].release());
    assert!(sockets[1].backend_of(99) == address(1099), "the other socket's entries stay");
    assert!(sockets[1].release());
    assert_eq!(table.len(), 0);
}

#[test]
fn without_room_nothing_is_remembered_and_nothing_forgotten() {
    // Two entries for each address beyond the slots, and the head: the third does not fit.
    let table = Table::new(5);
    let mut socket = Socket::new(&table, 1);
    let slots = DATAGRAM_SLOTS as u32;
    for n in 0..slots + 2 {
        assert!(socket.remember(n, 1000 + n));
    }
    assert!(!socket.remember(slots + 2, 1000));
    assert!((0..slots + 2).all(|n| socket.service_of(1000 + n) == address(n)));
    assert!(socket.release());
    assert_eq!(table.len(), 0);
}

#[cfg(feature = "user")]
#[test]
fn what_a_closed_socket_leaves_over_is_found() {
    let table = Table::new(usize::MAX);
    let mut sockets = [1, 2].map(|cookie| Socket::new(&table, cookie));
    let all = RELEASED + DATAGRAM_SLOTS as u32 + 2;
    assert!((0..all).all(|n| sockets.iter_mut().all(|it| it.remember(n, 100_000 + n))));
    assert!(!sockets[0].release());
    let entries: Vec<_> = table.entries.borrow().iter().map(|(key, peer)| (*key, *peer)).collect();
    let left: Vec<_> = left_over(&entries).collect();
    assert_eq!(left.len(), 5, "the head, and two entries for each of two addresses");
    left.into_iter().for_each(|it| sockets[0].view.remove(it));
    assert!((0..all).all(|n| sockets[1].service_of(100_000 + n) == address(n)));
}

#[test]
fn a_connected_socket_shows_where_it_was_led_until_it_goes_elsewhere() {
    let table = Table::new(usize::MAX);
    let socket = Socket::new(&table, 1);
    let shown = || socket.view.get(&PeerKey::connected(1)).map(|it| (it.next, it.other));
    for n in 1..3 {
        connect(&socket.view, &translation(n, 100));
        assert_eq!(shown(), Some((address(n), address(100))));
    }
    disconnect(&socket.view);
    assert_eq!(shown(), None);
    connect(&socket.view, &translation(1, 100));
    assert!(socket.release());
    assert_eq!(table.len(), 0);
}

#[test]
fn a_socket_whose_release_nobody_is_told_of_has_no_entries() {
    let table = Table::new(usize::MAX);
    let mut socket = Socket::new(&table, 1);
    socket.view.is_released = false;
    assert!((0..10).all(|n| socket.remember(n, 1000 + n)));
    assert_eq!(table.len(), 0);
    assert_eq!((socket.service_of(1009), socket.service_of(1000)), (address(9), Address::UNSET));
}

#[test]
fn the_canary_takes_no_room_of_others() {
    let table = Table::new(usize::MAX);
    let mut socket = Socket::new(&table, 1);
    for n in 0..DATAGRAM_SLOTS as u32 {
        assert!(socket.remember(n, 100 + n));
    }
    for port in 1..=100 {
        let [service, backend] =
            [canary::ADDRESS4, V4::LOOPBACK].map(|it| Address::new(it.mapped(), Be16::new(port)));
        assert!(remember(&mut socket.datagrams, &socket.view, Translation { service, backend }));
        assert_eq!(service_of(&socket.datagrams, &socket.view, &backend), service);
    }
    connect(&socket.view, &translation(1, 100));
    let service = Address::new(canary::ADDRESS6, Be16::new(53));
    connect(&socket.view, &Translation { service, backend: Address::new(V6::LOOPBACK, Be16::new(53)) });
    assert_eq!(table.len(), 0, "not even what it was connected to before");
}

#[test]
fn an_answer_under_way_outlives_a_change_of_the_backend() {
    let slots = DATAGRAM_SLOTS as u32;
    for services in [1, 2, slots, 3 * slots] {
        let table = Table::new(usize::MAX);
        let mut socket = Socket::new(&table, 1);
        for generation in 0..10 {
            for service in 0..services {
                assert!(socket.remember(service, 1000 * (generation + 1) + service));
            }
            for service in 0..services {
                let backend = 1000 * (generation + 1) + service;
                assert_eq!(socket.backend_of(service), address(backend));
                assert_eq!(socket.service_of(backend), address(service), "{services} Services");
                if generation > 0 {
                    assert_eq!(socket.service_of(backend - 1000), address(service), "{services} Services");
                }
            }
            // The head, and two entries for each backend.
            assert!(table.len() <= 1 + 4 * services as usize, "former ones do not pile up");
        }
        assert_eq!(table.len() == 0, services <= slots / 2);
        assert!(socket.release());
        assert_eq!(table.len(), 0);
    }
}

#[test]
fn former_backends_make_room_before_anything_is_refused() {
    let slots = DATAGRAM_SLOTS as u32;
    for room in 0..5 {
        let table = Table::new(room);
        let mut socket = Socket::new(&table, 1);
        let services = slots + u32::from(room >= 3);
        for generation in 1..10 {
            for service in 0..services {
                assert!(socket.remember(service, 1000 * generation + service), "{room} entries");
            }
            for service in 0..services {
                assert_eq!(socket.backend_of(service), address(1000 * generation + service));
                assert_eq!(socket.service_of(1000 * generation + service), address(service));
            }
        }
        assert!(socket.release());
        assert_eq!(table.len(), 0);
    }
}

proptest! {
    /// Against all that was ever remembered.
    #[test]
    fn any_history_is_remembered_and_leaves_nothing(
        room in prop_oneof![0..20_usize, Just(usize::MAX)],
        steps in prop::collection::vec((0..10_u32, 0..10_u32, 0..12_u8), 0..100),
    ) {
        let table = Table::new(room);
        let mut socket = Socket::new(&table, 1);
        // Where each Service address leads and led before, and everything that was remembered, in the order of use.
        let mut leads: BTreeMap<u32, (u32, Option<u32>)> = BTreeMap::new();
        let mut known: Vec<(u32, u32)> = Vec::new();
        for (service, backend, step) in steps {
            let backend = 1000 + backend;
            if step == 0 {
                forget(&mut socket.datagrams, &socket.view, &address(backend));
                leads.retain(|_, it| it.0 != backend);
                leads.values_mut().for_each(|it| it.1 = it.1.filter(|former| *former != backend));
                known.retain(|it| it.1 != backend);
            } else if socket.remember(service, backend) {
                let led = leads.get(&service).copied();
                let former = led.and_then(|(last, former)| if last == backend { former } else { Some(last) });
                leads.insert(service, (backend, former));
                known.retain(|it| *it != (service, backend));
                known.push((service, backend));
                prop_assert_eq!(socket.backend_of(service), address(backend));
                prop_assert_eq!(socket.service_of(backend), address(service));
            } else {
                prop_assert!(room != usize::MAX);
            }
            if room != usize::MAX {
                continue;
            }
            for (service, (backend, _)) in &leads {
                prop_assert_eq!(socket.backend_of(*service), address(*backend));
            }
            for backend in 1000..1010 {
                let answer = socket.service_of(backend);
                let last = known.iter().rev().find(|it| it.1 == backend);
                let lead = last.and_then(|it| leads.get(&it.0));
                if let (Some((service, _)), Some((now, former))) = (last, lead)
                    && (*now == backend || *former == Some(backend))
                {
                    prop_assert_eq!(answer, address(*service));
                } else {
                    // Whoever used it last went on twice, and another one may still have used it before.
                    let has_used = |it: &(u32, u32)| it.1 == backend && address(it.0) == answer;
                    prop_assert!(answer.is_unset() || known.iter().any(has_used));
                }
            }
            prop_assert!(table.len() <= 1 + 4 * socket.datagrams.more as usize);
        }
        prop_assert!(socket.release());
        prop_assert_eq!(table.len(), 0);
    }
}
