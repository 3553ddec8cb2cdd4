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
    /// Of a Service address: that of the next entry of the chain; unset at its end. Of a connected socket: the Service
    /// address.
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
    /// Removes an entry, if it is there; how many that were, 1 or 0, to be told of by [`Peers::gone`].
    fn take(&self, key: &PeerKey) -> u64;
    /// So many entries were removed.
    fn gone(&self, entries: u64);

    /// Removes an entry, if it is there.
    #[inline(always)]
    fn remove(&self, key: &PeerKey) {
        self.gone(self.take(key));
    }
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
/// False if there is no room for it: then nothing may be sent, for the reply would come from a stranger. The former one of
/// the same address, and any in the slots, are given up before.
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
    let mut gone = 0;
    // A turn has no branch but to the end: the verifier of Linux 5.15 goes both ways of any other again at every turn after
    // it, and gives up.
    for _ in 0..RELEASED {
        if key.address.is_unset() {
            break;
        }
        let Some(peer) = peers.get(&key) else { break };
        gone += peers.take(&PeerKey::backend(cookie, peer.other));
        gone += peers.take(&key);
        key.address = peer.next;
        key.kind = SERVICE | peer.used;
    }
    peers.gone(gone);
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
mod tests;
