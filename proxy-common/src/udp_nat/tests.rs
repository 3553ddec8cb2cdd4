//! Any history of a socket, against a table in memory: its translations are found, and its release leaves no entry.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
};

use proptest::prelude::*;

use super::*;
use crate::{
    net::{Be16, V4, V6},
    udp_nat_cache::{
        UDP_NAT_CACHE_SLOTS,
        tests::{address, nat},
    },
};

/// A table with room for `room` entries.
struct Table {
    room: usize,
    entries: RefCell<BTreeMap<UdpNatKey, UdpNatEntry>>,
    inserted: Cell<u64>,
    deleted: Cell<u64>,
}

impl Table {
    fn new(room: usize) -> Self {
        Self { room, entries: RefCell::default(), inserted: Cell::default(), deleted: Cell::default() }
    }

    /// How many entries there are, which the counts must agree with.
    fn len(&self) -> usize {
        let number = self.entries.borrow().len();
        assert_eq!(self.inserted.get() - self.deleted.get(), number as u64);
        number
    }
}

/// The table as one socket sees it.
struct View<'a> {
    table: &'a Table,
    cookie: u64,
    has_release_hook: bool,
}

impl UdpNatTable for View<'_> {
    fn cookie(&self) -> u64 {
        self.cookie
    }

    fn has_release_hook(&self) -> bool {
        self.has_release_hook
    }

    fn get(&self, key: &UdpNatKey) -> Option<UdpNatEntry> {
        self.table.entries.borrow().get(key).copied()
    }

    fn update(&self, key: &UdpNatKey, change: impl FnOnce(&mut UdpNatEntry)) -> bool {
        self.table.entries.borrow_mut().get_mut(key).map(change).is_some()
    }

    fn insert(&self, key: &UdpNatKey, entry: &UdpNatEntry) -> bool {
        let mut entries = self.table.entries.borrow_mut();
        assert!(!entries.contains_key(key), "only new entries are inserted");
        let has_room = entries.len() < self.table.room;
        if has_room {
            entries.insert(*key, *entry);
            self.table.inserted.update(|it| it + 1);
        }
        has_room
    }

    fn delete(&self, key: &UdpNatKey) -> u64 {
        self.table.entries.borrow_mut().remove(key).map_or(0, |_| 1)
    }

    fn count_deleted(&self, entries: u64) {
        self.table.deleted.update(|it| it + entries);
    }
}

/// One socket and the table.
struct Socket<'a> {
    cache: UdpNatCache,
    view: View<'a>,
}

impl<'a> Socket<'a> {
    fn new(table: &'a Table, cookie: u64) -> Self {
        Self { cache: UdpNatCache::default(), view: View { table, cookie, has_release_hook: true } }
    }

    fn insert(&mut self, service: u32, backend: u32) -> bool {
        insert(&mut self.cache, &self.view, nat(service, backend))
    }

    fn backend_of(&self, service: u32) -> SockAddr {
        backend_of(&self.cache, &self.view, &address(service))
    }

    fn service_of(&self, backend: u32) -> SockAddr {
        service_of(&self.cache, &self.view, &address(backend))
    }

    fn release(&self) -> bool {
        release(&self.view)
    }
}

#[test]
fn a_socket_has_any_number_of_addresses() {
    let table = Table::new(usize::MAX);
    let mut sockets = [1, 2].map(|cookie| Socket::new(&table, cookie));
    for n in 0..100 {
        assert!(sockets.iter_mut().all(|it| it.insert(n, 1000 + n)));
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
fn without_room_nothing_is_inserted_and_nothing_removed() {
    // Two entries for each address beyond the slots, and the head: the third does not fit.
    let table = Table::new(5);
    let mut socket = Socket::new(&table, 1);
    let slots = UDP_NAT_CACHE_SLOTS as u32;
    for n in 0..slots + 2 {
        assert!(socket.insert(n, 1000 + n));
    }
    assert!(!socket.insert(slots + 2, 1000));
    assert!((0..slots + 2).all(|n| socket.service_of(1000 + n) == address(n)));
    assert!(socket.release());
    assert_eq!(table.len(), 0);
}

#[cfg(feature = "user")]
#[test]
fn entries_leaked_by_a_closed_socket_are_found() {
    let table = Table::new(usize::MAX);
    let mut sockets = [1, 2].map(|cookie| Socket::new(&table, cookie));
    let all = MAX_RELEASED + UDP_NAT_CACHE_SLOTS as u32 + 2;
    assert!((0..all).all(|n| sockets.iter_mut().all(|it| it.insert(n, 100_000 + n))));
    assert!(!sockets[0].release());
    let entries: Vec<_> = table.entries.borrow().iter().map(|(key, entry)| (*key, *entry)).collect();
    let leaked: Vec<_> = leaked(&entries).collect();
    assert_eq!(leaked.len(), 5, "the head, and two entries for each of two addresses");
    leaked.into_iter().for_each(|it| sockets[0].view.remove(it));
    assert!((0..all).all(|n| sockets[1].service_of(100_000 + n) == address(n)));
}

#[test]
fn a_connected_socket_shows_its_translation_until_it_is_connected_elsewhere() {
    let table = Table::new(usize::MAX);
    let socket = Socket::new(&table, 1);
    let shown = || socket.view.get(&UdpNatKey::connected(1)).map(|it| (it.next, it.peer));
    for n in 1..3 {
        insert_connected(&socket.view, &nat(n, 100));
        assert_eq!(shown(), Some((address(n), address(100))));
    }
    remove_connected(&socket.view);
    assert_eq!(shown(), None);
    insert_connected(&socket.view, &nat(1, 100));
    assert!(socket.release());
    assert_eq!(table.len(), 0);
}

#[test]
fn a_socket_without_a_release_hook_has_no_entries() {
    let table = Table::new(usize::MAX);
    let mut socket = Socket::new(&table, 1);
    socket.view.has_release_hook = false;
    assert!((0..10).all(|n| socket.insert(n, 1000 + n)));
    assert_eq!(table.len(), 0);
    assert_eq!((socket.service_of(1009), socket.service_of(1000)), (address(9), SockAddr::UNSET));
}

#[test]
fn probes_take_no_room_of_others() {
    let table = Table::new(usize::MAX);
    let mut socket = Socket::new(&table, 1);
    for n in 0..UDP_NAT_CACHE_SLOTS as u32 {
        assert!(socket.insert(n, 100 + n));
    }
    for port in 1..=100 {
        let [service, backend] =
            [probe::ADDRESS4, V4::LOOPBACK].map(|it| SockAddr::new(it.mapped(), Be16::new(port)));
        assert!(insert(&mut socket.cache, &socket.view, SockNat { service, backend }));
        assert_eq!(service_of(&socket.cache, &socket.view, &backend), service);
    }
    insert_connected(&socket.view, &nat(1, 100));
    let service = SockAddr::new(probe::ADDRESS6, Be16::new(53));
    insert_connected(&socket.view, &SockNat { service, backend: SockAddr::new(V6::LOOPBACK, Be16::new(53)) });
    assert_eq!(table.len(), 0, "nor for what it was connected to before");
}

#[test]
fn a_reply_in_flight_survives_a_change_of_the_backend() {
    let slots = UDP_NAT_CACHE_SLOTS as u32;
    for services in [1, 2, slots, 3 * slots] {
        let table = Table::new(usize::MAX);
        let mut socket = Socket::new(&table, 1);
        for generation in 0..10 {
            for service in 0..services {
                assert!(socket.insert(service, 1000 * (generation + 1) + service));
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
            assert!(table.len() <= 1 + 4 * services as usize, "previous ones do not pile up");
        }
        assert_eq!(table.len() == 0, services <= slots / 2);
        assert!(socket.release());
        assert_eq!(table.len(), 0);
    }
}

#[test]
fn previous_backends_are_evicted_before_anything_is_refused() {
    let slots = UDP_NAT_CACHE_SLOTS as u32;
    for room in 0..5 {
        let table = Table::new(room);
        let mut socket = Socket::new(&table, 1);
        let services = slots + u32::from(room >= 3);
        for generation in 1..10 {
            for service in 0..services {
                assert!(socket.insert(service, 1000 * generation + service), "{room} entries");
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
    /// Against everything that was ever inserted.
    #[test]
    fn any_history_is_found_and_its_release_leaves_nothing(
        room in prop_oneof![0..20_usize, Just(usize::MAX)],
        steps in prop::collection::vec((0..10_u32, 0..10_u32, 0..12_u8), 0..100),
    ) {
        let table = Table::new(room);
        let mut socket = Socket::new(&table, 1);
        // The current and the previous backend of each Service address, and everything ever inserted, in the order of use.
        let mut current: BTreeMap<u32, (u32, Option<u32>)> = BTreeMap::new();
        let mut known: Vec<(u32, u32)> = Vec::new();
        for (service, backend, step) in steps {
            let backend = 1000 + backend;
            if step == 0 {
                remove(&mut socket.cache, &socket.view, &address(backend));
                current.retain(|_, it| it.0 != backend);
                current.values_mut().for_each(|it| it.1 = it.1.filter(|it| *it != backend));
                known.retain(|it| it.1 != backend);
            } else if socket.insert(service, backend) {
                let last = current.get(&service).copied();
                let previous = last.and_then(|(last, previous)| if last == backend { previous } else { Some(last) });
                current.insert(service, (backend, previous));
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
            for (service, (backend, _)) in &current {
                prop_assert_eq!(socket.backend_of(*service), address(*backend));
            }
            for backend in 1000..1010 {
                let found = socket.service_of(backend);
                let last = known.iter().rev().find(|it| it.1 == backend);
                let backends = last.and_then(|it| current.get(&it.0));
                if let (Some((service, _)), Some((now, previous))) = (last, backends)
                    && (*now == backend || *previous == Some(backend))
                {
                    prop_assert_eq!(found, address(*service));
                } else {
                    // The Service that used it last has changed backends twice since; another one may have used it before.
                    let has_used = |it: &(u32, u32)| it.1 == backend && address(it.0) == found;
                    prop_assert!(found.is_unset() || known.iter().any(has_used));
                }
            }
            prop_assert!(table.len() <= 1 + 4 * socket.cache.overflow_count as usize);
        }
        prop_assert!(socket.release());
        prop_assert_eq!(table.len(), 0);
    }
}
