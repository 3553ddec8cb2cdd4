//! What unconnected UDP sockets remember beyond the slots of their own storage ([`Datagrams`]): entries of one table that
//! all sockets share, each under its socket's cookie.
//!
//! The one rule: an entry belongs to one socket, and goes only with it, or by its own doing; nobody's is ever evicted.
//! A socket has up to four kinds of them. Each further Service address has one that says where it leads, and these make
//! a chain, so that a socket that is closed finds them all. One whose backend has changed has another, the next in the
//! chain, which says where it led before. Each backend, that of before included, has one that says whose reply it sends.
//! And one is the head of the chain.
//! As with [`Datagrams`], the hooks run under the socket's lock.

#[cfg(feature = "user")]
use bytemuck::{Pod, Zeroable};

use crate::{
    canary,
    socket::{Address, Datagrams, Translation},
};

/// How many entries of its chain a socket gives up when it is closed. Of one that has more, the rest is left to user space:
/// the verifier walks through every turn of a loop.
pub const RELEASED: u32 = 256;

/// What an entry is found by.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct PeerKey {
    /// The cookie of the socket.
    pub cookie: u64,
    /// The Service's address, the backend's, or none.
    pub address: Address,
    /// [`SERVICE`], [`BACKEND`], [`HEAD`], [`CONNECTED`] or [`FORMER`].
    pub kind: u32,
}

/// The entry of a Service address.
pub const SERVICE: u32 = 1;
/// The entry of a backend.
pub const BACKEND: u32 = 2;
/// The head of a socket's chain.
pub const HEAD: u32 = 3;
/// The entry of a connected socket without a slot.
pub const CONNECTED: u32 = 4;
/// The entry of a Service address for its backend of before.
pub const FORMER: u32 = 5;
const _: () = assert!(SERVICE | FORMER == FORMER, "as `Peer::used` needs it");

/// An entry.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Peer {
    /// Of a Service address, the backend, or the one before; of a backend, the Service address that was used last; of the
    /// head, the first Service address of the chain; of a connected socket, the backend.
    pub other: Address,
    /// Of a backend: when it was used, by [`Datagrams::clock`]. Of a Service address: of what kind the next entry of the
    /// chain is, [`FORMER`], or 0 for [`SERVICE`]. Of the head: 1 if the socket is closed and the rest of its entries are
    /// left over, else 0.
    pub used: u32,
    /// Of a Service address: that of the next entry of the chain; unset at its end. Of a connected socket: the Service address.
    pub next: Address,
    /// Always zero.
    pub zero: u32,
}

impl PeerKey {
    const fn service(cookie: u64, address: Address) -> Self {
        Self { cookie, address, kind: SERVICE }
    }

    const fn backend(cookie: u64, address: Address) -> Self {
        Self { cookie, address, kind: BACKEND }
    }

    const fn former(cookie: u64, address: Address) -> Self {
        Self { cookie, address, kind: FORMER }
    }

    const fn head(cookie: u64) -> Self {
        Self { cookie, address: Address::UNSET, kind: HEAD }
    }

    /// That of a connected socket.
    pub const fn connected(cookie: u64) -> Self {
        Self { cookie, address: Address::UNSET, kind: CONNECTED }
    }
}

/// What is counted, by position: entries that ever came.
pub const CAME: u32 = 0;
/// Entries that the programs took away.
pub const WENT: u32 = 1;
/// Datagrams that were not sent for want of room.
pub const REFUSED: u32 = 2;
/// Closed sockets that left entries over.
pub const LEFT: u32 = 3;
/// Entries that user space took away, of closed sockets that left them over.
pub const SWEPT: u32 = 4;
/// How many such counts there are.
pub const COUNTS: u32 = 5;

/// The table, as one socket sees it. What is not asked for costs nothing.
pub trait Peers {
    /// The socket's cookie.
    fn cookie(&self) -> u64;
    /// Whether the socket's release will be told; if not, nobody would take its entries away.
    fn is_released(&self) -> bool;
    /// An entry.
    fn get(&self, key: &PeerKey) -> Option<Peer>;
    /// Changes an entry; false if it is not there.
    fn update(&self, key: &PeerKey, change: impl FnOnce(&mut Peer)) -> bool;
    /// Adds an entry that is not there; false if there is no room.
    fn add(&self, key: &PeerKey, peer: &Peer) -> bool;
    /// Removes an entry, if it is there.
    fn remove(&self, key: &PeerKey);
}

/// Where the socket was led when it last sent to `service`; unset if it never did.
#[inline(always)]
pub fn backend_of(datagrams: &Datagrams, peers: &impl Peers, service: &Address) -> Address {
    if let Some(backend) = datagrams.backend_of(service) {
        return backend;
    }
    if datagrams.more == 0 {
        return Address::UNSET;
    }
    peers.get(&PeerKey::service(peers.cookie(), *service)).map_or(Address::UNSET, |it| it.other)
}

/// Which Service address the socket meant when something from `backend` answers: of several, the one it used last; unset
/// if none.
#[inline(always)]
pub fn service_of(datagrams: &Datagrams, peers: &impl Peers, backend: &Address) -> Address {
    let (service, used) = datagrams.service_of(backend);
    if datagrams.more != 0
        && let Some(peer) = peers.get(&PeerKey::backend(peers.cookie(), *backend))
        && (service.is_unset() || peer.used > used)
    {
        return peer.other;
    }
    service
}

/// Remembers `translation`, and what was in force of the same Service address until now as its former one: the backend of
/// before may have an answer under way.
/// False if there is no room for it: then nothing may be sent, for the reply would come from a stranger. No former
/// translation is the reason for that: they make room.
#[inline(always)]
pub fn remember(datagrams: &mut Datagrams, peers: &impl Peers, translation: Translation) -> bool {
    datagrams.tick();
    if datagrams.renew(&translation) {
        return true;
    }
    let Translation { service, .. } = translation;
    let is_own = datagrams.backend_of(&service).is_some();
    let known = match datagrams.more {
        0 => Peer::default(),
        _ => peers.get(&PeerKey::service(peers.cookie(), service)).unwrap_or_default(),
    };
    // Whoever is beyond the slots stays there: its place in the chain is only given up with the socket.
    if (is_own || known.other.is_unset()) && datagrams.remember(translation) {
        return true;
    }
    // Without a release it makes do with its own storage. So does who asks the canary: anybody may, at any number of
    // ports.
    let goes_beyond = !known.other.is_unset() || (peers.is_released() && !canary::is(service.ip));
    if goes_beyond && remember_beyond(datagrams, peers, &known, &translation) {
        datagrams.retire(&service);
        return true;
    }
    if datagrams.displace(translation) {
        return true;
    }
    if !goes_beyond {
        datagrams.replace(translation);
    }
    !goes_beyond
}

/// The same beyond the slots; `known` is the entry of the Service address, or unset.
#[inline(always)]
fn remember_beyond(
    datagrams: &mut Datagrams,
    peers: &impl Peers,
    known: &Peer,
    translation: &Translation,
) -> bool {
    let cookie = peers.cookie();
    if known.other.is_unset() {
        return chain(datagrams, peers, cookie, translation)
            && lead_back(datagrams, peers, cookie, translation);
    }
    let Translation { service, backend } = translation;
    if known.other == *backend {
        return lead_back(datagrams, peers, cookie, translation);
    }
    keep_former(peers, cookie, known, translation);
    peers.update(&PeerKey::service(cookie, *service), |it| it.other = *backend);
    if lead_back(datagrams, peers, cookie, translation) {
        return true;
    }
    lead_back_no_more(peers, cookie, service, &known.other);
    lead_back(datagrams, peers, cookie, translation)
}

/// Adds a Service address to the chain; false if there is no room.
#[inline(always)]
fn chain(
    datagrams: &mut Datagrams,
    peers: &impl Peers,
    cookie: u64,
    &Translation { service, backend }: &Translation,
) -> bool {
    let head = PeerKey::head(cookie);
    let next = peers.get(&head).map_or(Address::UNSET, |it| it.other);
    if !peers.add(&PeerKey::service(cookie, service), &Peer { other: backend, next, ..Peer::default() }) {
        return false;
    }
    let is_chained = peers.update(&head, |it| it.other = service)
        || peers.add(&head, &Peer { other: service, ..Peer::default() });
    if is_chained {
        datagrams.more += 1;
    } else {
        peers.remove(&PeerKey::service(cookie, service));
    }
    is_chained
}

/// Keeps the backend that a Service address led to until now as its former one, in the place of the one before that. Where
/// there is no room it is given up.
#[inline(always)]
fn keep_former(
    peers: &impl Peers,
    cookie: u64,
    known: &Peer,
    Translation { service, backend }: &Translation,
) {
    let key = PeerKey::former(cookie, *service);
    if known.used == FORMER {
        let before = peers.get(&key).map_or(Address::UNSET, |it| it.other);
        if before != *backend {
            lead_back_no_more(peers, cookie, service, &before);
        }
        peers.update(&key, |it| it.other = known.other);
    } else if peers.add(&key, known) {
        // Its place in the chain is behind the entry that it is taken from.
        peers.update(&PeerKey::service(cookie, *service), |it| {
            it.next = *service;
            it.used = FORMER;
        });
    } else {
        lead_back_no_more(peers, cookie, service, &known.other);
    }
}

/// Whoever led to `backend` last may have been another Service address, whose entry it is then.
#[inline(always)]
fn lead_back_no_more(peers: &impl Peers, cookie: u64, service: &Address, backend: &Address) {
    let key = PeerKey::backend(cookie, *backend);
    if peers.get(&key).is_some_and(|it| it.other == *service) {
        peers.remove(&key);
    }
}

#[inline(always)]
fn lead_back(
    datagrams: &Datagrams,
    peers: &impl Peers,
    cookie: u64,
    &Translation { service, backend }: &Translation,
) -> bool {
    let (key, used) = (PeerKey::backend(cookie, backend), datagrams.clock);
    peers.update(&key, |it| {
        it.other = service;
        it.used = used;
    }) || peers.add(&key, &Peer { other: service, used, ..Peer::default() })
}

/// Forgets every translation to `backend`: the socket talks to it directly now.
#[inline(always)]
pub fn forget(datagrams: &mut Datagrams, peers: &impl Peers, backend: &Address) {
    datagrams.forget(backend);
    if datagrams.more != 0 {
        peers.remove(&PeerKey::backend(peers.cookie(), *backend));
    }
}

/// Shows user space where a connected UDP socket without a slot was led: the kernel does not tell what such a socket has
/// in its storage. Without room it is not found when its backend goes, and nothing else is lost. The canary's never goes.
#[inline(always)]
pub fn connect(peers: &impl Peers, Translation { service, backend }: &Translation) {
    if !peers.is_released() {
        return;
    }
    if canary::is(service.ip) {
        return disconnect(peers);
    }
    let key = PeerKey::connected(peers.cookie());
    let is_there = peers.update(&key, |it| {
        it.other = *backend;
        it.next = *service;
    });
    if !is_there {
        peers.add(&key, &Peer { other: *backend, next: *service, ..Peer::default() });
    }
}

/// The socket is connected elsewhere now.
#[inline(always)]
pub fn disconnect(peers: &impl Peers) {
    peers.remove(&PeerKey::connected(peers.cookie()));
}

/// Removes the entries of a socket that is closed; false if some are left over, and its head says so.
#[inline(always)]
pub fn release(peers: &impl Peers) -> bool {
    let cookie = peers.cookie();
    peers.remove(&PeerKey::connected(cookie));
    let head = PeerKey::head(cookie);
    let Some(first) = peers.get(&head) else { return true };
    let mut key = PeerKey::service(cookie, first.other);
    for _ in 0..RELEASED {
        if key.address.is_unset() {
            break;
        }
        let Some(peer) = peers.get(&key) else { break };
        peers.remove(&PeerKey::backend(cookie, peer.other));
        peers.remove(&key);
        key.address = peer.next;
        // Without a branch, of which the verifier would go both ways at every turn.
        key.kind = SERVICE | peer.used;
    }
    if key.address.is_unset() {
        peers.remove(&head);
        return true;
    }
    peers.update(&head, |it| it.used = 1);
    false
}

/// Of all entries, those that closed sockets have left over.
#[cfg(feature = "user")]
pub fn left_over(entries: &[(PeerKey, Peer)]) -> impl Iterator<Item = &PeerKey> {
    let heads = entries.iter().filter(|(key, peer)| key.kind == HEAD && peer.used == 1);
    let closed: std::collections::HashSet<u64> = heads.map(|(key, _)| key.cookie).collect();
    entries.iter().map(|(key, _)| key).filter(move |it| closed.contains(&it.cookie))
}

const _: () = assert!(size_of::<PeerKey>() == 32);
const _: () = assert!(size_of::<Peer>() == 48);

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, collections::BTreeMap};

    use proptest::prelude::*;

    use super::*;
    use crate::{
        net::{Be16, V6},
        socket::DATAGRAM_SLOTS,
    };

    /// A table with room for so many entries.
    struct Table {
        room: usize,
        entries: RefCell<BTreeMap<PeerKey, Peer>>,
    }

    impl Table {
        fn new(room: usize) -> Self {
            Self { room, entries: RefCell::default() }
        }

        fn len(&self) -> usize {
            self.entries.borrow().len()
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
            }
            has_room
        }

        fn remove(&self, key: &PeerKey) {
            self.table.entries.borrow_mut().remove(key);
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
                [canary::ADDRESS4, canary::LOOPBACK4].map(|it| Address::new(it.mapped(), Be16::new(port)));
            assert!(remember(&mut socket.datagrams, &socket.view, Translation { service, backend }));
            assert_eq!(service_of(&socket.datagrams, &socket.view, &backend), service);
        }
        connect(&socket.view, &translation(1, 100));
        let service = Address::new(canary::ADDRESS6, Be16::new(53));
        connect(
            &socket.view,
            &Translation { service, backend: Address::new(canary::LOOPBACK6, Be16::new(53)) },
        );
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
                        assert_eq!(
                            socket.service_of(backend - 1000),
                            address(service),
                            "{services} Services"
                        );
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
}
