//! Any history of a socket, against a table in memory: its translations are found, and its release leaves no entry.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
};

use proptest::prelude::*;

use super::*;
use crate::{
    net::{Be16, V6},
    overflow::{MAX_RELEASED, OverflowKey, connected, insert_connected, release, remove_connected},
};

const NETNS: u64 = 0x1_0000_0001;

fn address(n: u32) -> SockAddr {
    SockAddr::new(V6::from_raw([1, 2, 3, n]), Be16::new(53))
}

fn nat(service: u32, backend: u32) -> SockNat {
    SockNat { service: address(service), backend: address(backend) }
}

#[derive(Default)]
struct Table {
    room: usize,
    entries: RefCell<BTreeMap<OverflowKey, OverflowEntry>>,
    sockets: Cell<u32>,
    inserted: Cell<u64>,
    deleted: Cell<u64>,
}

impl Table {
    fn new(room: usize) -> Self {
        Self { room, ..Self::default() }
    }

    /// How many entries there are, which the counts must agree with.
    fn len(&self) -> usize {
        let number = self.entries.borrow().len();
        assert_eq!(self.inserted.get() - self.deleted.get(), number as u64);
        assert!(number == 0 || self.sockets.get() > 0);
        number
    }
}

struct View<'a> {
    table: &'a Table,
    cookie: u64,
}

impl OverflowTable for View<'_> {
    fn cookie(&self) -> u64 {
        self.cookie
    }

    fn netns(&self) -> u64 {
        NETNS
    }

    fn is_in_use(&self) -> bool {
        self.table.sockets.get() > 0
    }

    fn add_socket(&self) {
        self.table.sockets.update(|it| it + 1);
    }

    fn remove_socket(&self) {
        self.table.sockets.update(|it| it - 1);
    }

    fn get(&self, key: &OverflowKey) -> Option<OverflowEntry> {
        self.table.entries.borrow().get(key).copied()
    }

    fn update(&self, key: &OverflowKey, change: impl FnOnce(&mut OverflowEntry)) -> bool {
        self.table.entries.borrow_mut().get_mut(key).map(change).is_some()
    }

    fn insert(&self, key: &OverflowKey, entry: &OverflowEntry) -> bool {
        let mut entries = self.table.entries.borrow_mut();
        assert!(!entries.contains_key(key), "only new entries are inserted");
        let has_room = entries.len() < self.table.room;
        if has_room {
            entries.insert(*key, *entry);
            self.table.inserted.update(|it| it + 1);
        }
        has_room
    }

    fn delete(&self, key: &OverflowKey) -> u64 {
        self.table.entries.borrow_mut().remove(key).map_or(0, |_| 1)
    }

    fn count_deleted(&self, entries: u64) {
        self.table.deleted.update(|it| it + entries);
    }
}

struct Socket<'a> {
    slot: Option<NatSlot>,
    view: View<'a>,
}

impl<'a> Socket<'a> {
    fn new(table: &'a Table, cookie: u64) -> Self {
        Self { slot: Some(NatSlot::default()), view: View { table, cookie } }
    }

    fn without_slot(table: &'a Table, cookie: u64) -> Self {
        Self { slot: None, ..Self::new(table, cookie) }
    }

    fn insert(&mut self, service: u32, backend: u32) -> bool {
        insert(self.slot.as_mut(), &self.view, &nat(service, backend))
    }

    fn backend_of(&self, service: u32) -> SockAddr {
        backend_of(self.slot.as_ref(), &self.view, &address(service))
    }

    fn service_of(&self, backend: u32) -> SockAddr {
        service_of(self.slot.as_ref(), &self.view, &address(backend))
    }

    fn remove(&mut self, backend: u32) {
        remove(self.slot.as_mut(), &self.view, &address(backend));
    }

    fn release(&self) -> bool {
        let backend = self.slot.map_or(SockAddr::UNSET, |it| it.unconnected().backend);
        !self.view.is_in_use() || release(&self.view, backend)
    }
}

#[test]
fn the_first_address_needs_no_entry() {
    let table = Table::new(0);
    let mut socket = Socket::new(&table, 1);
    assert!(socket.insert(1, 100) && socket.insert(1, 100));
    assert_eq!((socket.backend_of(1), socket.service_of(100)), (address(100), address(1)));
    assert!(socket.insert(1, 101), "its backend may change");
    assert_eq!((socket.backend_of(1), socket.service_of(101)), (address(101), address(1)));
    assert!(!socket.insert(2, 200), "a second one has no room");
    assert_eq!((socket.backend_of(1), socket.backend_of(2)), (address(101), SockAddr::UNSET));
}

#[test]
fn the_slot_of_a_connected_socket_is_not_taken() {
    let table = Table::new(usize::MAX);
    let mut socket = Socket::new(&table, 1);
    socket.slot = Some(NatSlot { nat: nat(1, 100), ..NatSlot::default() });
    assert!(socket.insert(2, 100));
    assert_eq!(socket.slot.unwrap().connected(), nat(1, 100));
    assert_eq!((socket.backend_of(2), socket.service_of(100)), (address(100), address(2)));
    assert_eq!(socket.backend_of(1), SockAddr::UNSET, "that of its connect");
    assert!(socket.release());
    assert_eq!(table.len(), 0);
}

#[test]
fn without_room_nothing_is_inserted_and_nothing_removed() {
    // Two entries for each address beyond the slot, and the head: the third does not fit.
    let table = Table::new(5);
    let mut socket = Socket::new(&table, 1);
    for n in 0..3 {
        assert!(socket.insert(n, 1000 + n));
    }
    assert!(!socket.insert(3, 1003));
    assert!((0..3).all(|n| socket.service_of(1000 + n) == address(n)));
    assert!(socket.release());
    assert_eq!(table.len(), 0);
}

#[cfg(feature = "user")]
#[test]
fn entries_leaked_by_a_closed_socket_are_found() {
    use crate::overflow::leaked;

    let table = Table::new(usize::MAX);
    let mut sockets = [1, 2].map(|cookie| Socket::new(&table, cookie));
    let all = MAX_RELEASED + 1 + 2;
    assert!((0..all).all(|n| sockets.iter_mut().all(|it| it.insert(n, 100_000 + n))));
    assert!(!sockets[0].release());
    let entries: Vec<_> = table.entries.borrow().iter().map(|(key, entry)| (*key, *entry)).collect();
    let leaked: Vec<_> = leaked(&entries).collect();
    assert_eq!(leaked.len(), 5, "the head, and two entries for each of two addresses");
    assert!(leaked.iter().all(|it| it.1 == NETNS));
    leaked.into_iter().for_each(|it| sockets[0].view.remove(it.0));
    assert!((0..all).all(|n| sockets[1].service_of(100_000 + n) == address(n)));
    assert_eq!(table.sockets.get(), 1);
}

#[test]
fn a_connected_socket_shows_its_translation_until_it_is_connected_elsewhere() {
    let table = Table::new(usize::MAX);
    let socket = Socket::new(&table, 1);
    for n in 1..3 {
        assert!(insert_connected(&socket.view, &nat(n, 100)));
        assert_eq!(connected(&socket.view), nat(n, 100));
    }
    remove_connected(&socket.view);
    assert_eq!((connected(&socket.view), table.sockets.get()), (SockNat::default(), 0));
    assert!(insert_connected(&socket.view, &nat(1, 100)));
    assert!(socket.release());
    assert_eq!((table.len(), table.sockets.get()), (0, 0));
    assert!(!insert_connected(&Socket::new(&Table::new(0), 1).view, &nat(1, 100)));
}

#[test]
fn a_reply_in_flight_survives_a_change_of_the_backend() {
    for (services, has_slot) in [(1, true), (2, true), (12, true), (1, false), (12, false)] {
        let table = Table::new(usize::MAX);
        let mut socket = if has_slot { Socket::new(&table, 1) } else { Socket::without_slot(&table, 1) };
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
        assert!(socket.release());
        assert_eq!((table.len(), table.sockets.get()), (0, 0));
    }
}

#[test]
fn current_backends_are_kept_when_there_is_no_room_for_previous_ones() {
    for room in 0..6 {
        let table = Table::new(room);
        let mut socket = Socket::new(&table, 1);
        let services = if room >= 3 { 2 } else { 1 };
        for generation in 1..10 {
            // Those in the table first: the previous backend of the one in the slot takes no room that they need.
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
        has_slot in any::<bool>(),
        steps in prop::collection::vec((0..10_u32, 0..10_u32, 0..12_u8), 0..100),
    ) {
        let table = Table::new(room);
        let mut socket = if has_slot { Socket::new(&table, 1) } else { Socket::without_slot(&table, 1) };
        // The current and the previous backend of each Service address, and everything ever inserted, in the order of use.
        let mut current: BTreeMap<u32, (u32, Option<u32>)> = BTreeMap::new();
        let mut known: Vec<(u32, u32)> = Vec::new();
        for (service, backend, step) in steps {
            let backend = 1000 + backend;
            if step == 0 {
                socket.remove(backend);
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
            prop_assert!(table.len() <= 1 + 4 * 10);
        }
        prop_assert!(socket.release());
        prop_assert_eq!((table.len(), table.sockets.get()), (0, 0));
    }
}
