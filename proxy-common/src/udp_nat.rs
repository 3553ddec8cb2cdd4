//! Translations of unconnected UDP sockets that exceed their own storage ([`UdpNatCache`]): entries of one table that all
//! sockets share, each under its socket's cookie.
//!
//! Invariant: an entry belongs to one socket, and only that socket removes it or its release does; no entry is ever evicted.
//! A socket has up to four kinds of entries. Each further Service address has one with its current backend; these are linked
//! into a chain, so that the release of the socket finds them all. A Service address whose backend has changed has a second
//! one, next in the chain, with its previous backend. Each backend, previous ones included, has a reverse entry with the
//! Service address whose reply it sends. And one entry is the head of the chain.
//! As with [`UdpNatCache`], the hooks run under the socket's lock.

#[cfg(feature = "user")]
use bytemuck::{Pod, Zeroable};

use crate::{net::SockAddr, probe, sock_nat::SockNat, udp_nat_cache::UdpNatCache};

/// How many chained entries the release of a socket removes. User space collects the rest: the verifier walks through every
/// iteration of a loop.
pub const MAX_RELEASED: u32 = 256;

/// The key of an entry.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct UdpNatKey {
    /// The cookie of the socket.
    pub cookie: u64,
    /// The Service's address, the backend's, or none.
    pub address: SockAddr,
    /// [`SERVICE`], [`BACKEND`], [`HEAD`], [`CONNECTED`] or [`PREVIOUS`].
    pub kind: u32,
}

/// The entry of a Service address.
pub const SERVICE: u32 = 1;
/// The reverse entry of a backend.
pub const BACKEND: u32 = 2;
/// The head of a socket's chain.
pub const HEAD: u32 = 3;
/// The entry of a connected socket without a slot.
pub const CONNECTED: u32 = 4;
/// The entry of a Service address for its previous backend.
pub const PREVIOUS: u32 = 5;
const _: () = assert!(SERVICE | PREVIOUS == PREVIOUS, "`UdpNatEntry::used` relies on it");

/// An entry.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct UdpNatEntry {
    /// Of a Service address, its current or previous backend; of a backend, the Service address used last; of the head, the
    /// first Service address of the chain; of a connected socket, the backend.
    pub peer: SockAddr,
    /// Of a backend: when it was used, by [`UdpNatCache::clock`]. Of a Service address: the kind of the next entry of the
    /// chain, [`PREVIOUS`], or 0 for [`SERVICE`]. Of the head: 1 if the socket is closed and the rest of its entries has
    /// leaked, else 0.
    pub used: u32,
    /// Of a Service address: that of the next entry of the chain; unset at its end. Of a connected socket: the Service
    /// address.
    pub next: SockAddr,
    /// Always zero.
    pub zero: u32,
}

impl UdpNatKey {
    const fn service(cookie: u64, address: SockAddr) -> Self {
        Self { cookie, address, kind: SERVICE }
    }

    const fn backend(cookie: u64, address: SockAddr) -> Self {
        Self { cookie, address, kind: BACKEND }
    }

    const fn previous(cookie: u64, address: SockAddr) -> Self {
        Self { cookie, address, kind: PREVIOUS }
    }

    const fn head(cookie: u64) -> Self {
        Self { cookie, address: SockAddr::UNSET, kind: HEAD }
    }

    /// That of a connected socket.
    pub const fn connected(cookie: u64) -> Self {
        Self { cookie, address: SockAddr::UNSET, kind: CONNECTED }
    }
}

/// What is counted, by position: entries ever inserted.
pub const INSERTED: u32 = 0;
/// Entries that the programs deleted.
pub const DELETED: u32 = 1;
/// Datagrams that were not sent for want of room.
pub const REFUSED: u32 = 2;
/// Closed sockets that leaked entries.
pub const LEAKED: u32 = 3;
/// Leaked entries that user space collected.
pub const COLLECTED: u32 = 4;
/// How many such counts there are.
pub const STAT_COUNT: u32 = 5;

/// The table as one socket sees it. Methods that are not called cost nothing.
pub trait UdpNatTable {
    /// The socket's cookie.
    fn cookie(&self) -> u64;
    /// Whether the release of the socket runs a program; if not, nothing would delete its entries.
    fn has_release_hook(&self) -> bool;
    /// An entry.
    fn get(&self, key: &UdpNatKey) -> Option<UdpNatEntry>;
    /// Changes an entry; false if there is none.
    fn update(&self, key: &UdpNatKey, change: impl FnOnce(&mut UdpNatEntry)) -> bool;
    /// Inserts a new entry; false if there is no room.
    fn insert(&self, key: &UdpNatKey, entry: &UdpNatEntry) -> bool;
    /// Deletes an entry, if there is one; returns how many that were, 1 or 0, to be passed to
    /// [`UdpNatTable::count_deleted`].
    fn delete(&self, key: &UdpNatKey) -> u64;
    /// Counts deleted entries.
    fn count_deleted(&self, entries: u64);

    /// Deletes and counts an entry, if there is one.
    #[inline(always)]
    fn remove(&self, key: &UdpNatKey) {
        self.count_deleted(self.delete(key));
    }
}

/// The current backend of `service`; unset if the socket never sent there.
#[inline(always)]
pub fn backend_of(cache: &UdpNatCache, table: &impl UdpNatTable, service: &SockAddr) -> SockAddr {
    if let Some(backend) = cache.backend_of(service) {
        return backend;
    }
    if cache.overflow_count == 0 {
        return SockAddr::UNSET;
    }
    table.get(&UdpNatKey::service(table.cookie(), *service)).map_or(SockAddr::UNSET, |it| it.peer)
}

/// The Service address that a reply from `backend` belongs to: of several, the one used last; unset if none.
#[inline(always)]
pub fn service_of(cache: &UdpNatCache, table: &impl UdpNatTable, backend: &SockAddr) -> SockAddr {
    let (service, used) = cache.service_of(backend);
    if cache.overflow_count != 0
        && let Some(entry) = table.get(&UdpNatKey::backend(table.cookie(), *backend))
        && (service.is_unset() || entry.used > used)
    {
        return entry.peer;
    }
    service
}

/// Stores `nat`, and demotes the current translation of the same Service address to the previous one: its backend may have
/// sent a reply already.
/// False if there is no room: then nothing may be sent, as the reply would show the backend as its source. Before that, the
/// previous translation of the same address and any previous one in the cache are evicted.
#[inline(always)]
pub fn insert(cache: &mut UdpNatCache, table: &impl UdpNatTable, nat: SockNat) -> bool {
    cache.tick();
    if cache.touch(&nat) {
        return true;
    }
    let SockNat { service, .. } = nat;
    let is_cached = cache.backend_of(&service).is_some();
    let known = match cache.overflow_count {
        0 => UdpNatEntry::default(),
        _ => table.get(&UdpNatKey::service(table.cookie(), service)).unwrap_or_default(),
    };
    // An address in the table stays there: only the release of the socket unlinks an entry.
    if (is_cached || known.peer.is_unset()) && cache.insert(nat) {
        return true;
    }
    // Without a release hook the cache has to do. The same goes for probes: any process may send them, to any number of
    // ports.
    let uses_table = !known.peer.is_unset() || (table.has_release_hook() && !probe::is_probe(service.ip));
    if uses_table && insert_in_table(cache, table, &known, &nat) {
        cache.demote(&service);
        return true;
    }
    if cache.evict(nat) {
        return true;
    }
    if !uses_table {
        cache.replace(nat);
    }
    !uses_table
}

/// Stores `nat` in the table; `known` is the entry of its Service address, or unset.
#[inline(always)]
fn insert_in_table(
    cache: &mut UdpNatCache,
    table: &impl UdpNatTable,
    known: &UdpNatEntry,
    nat: &SockNat,
) -> bool {
    let cookie = table.cookie();
    if known.peer.is_unset() {
        return link_entry(cache, table, cookie, nat) && insert_reverse(cache, table, cookie, nat);
    }
    let SockNat { service, backend } = nat;
    if known.peer == *backend {
        return insert_reverse(cache, table, cookie, nat);
    }
    demote_entry(table, cookie, known, nat);
    table.update(&UdpNatKey::service(cookie, *service), |it| it.peer = *backend);
    if insert_reverse(cache, table, cookie, nat) {
        return true;
    }
    remove_reverse(table, cookie, service, &known.peer);
    insert_reverse(cache, table, cookie, nat)
}

/// Inserts the entry of a Service address at the head of the chain; false if there is no room.
#[inline(always)]
fn link_entry(
    cache: &mut UdpNatCache,
    table: &impl UdpNatTable,
    cookie: u64,
    &SockNat { service, backend }: &SockNat,
) -> bool {
    let head = UdpNatKey::head(cookie);
    let next = table.get(&head).map_or(SockAddr::UNSET, |it| it.peer);
    let entry = UdpNatEntry { peer: backend, next, ..UdpNatEntry::default() };
    if !table.insert(&UdpNatKey::service(cookie, service), &entry) {
        return false;
    }
    let is_linked = table.update(&head, |it| it.peer = service)
        || table.insert(&head, &UdpNatEntry { peer: service, ..UdpNatEntry::default() });
    if is_linked {
        cache.overflow_count += 1;
    } else {
        table.remove(&UdpNatKey::service(cookie, service));
    }
    is_linked
}

/// Demotes the current backend of a Service address to its previous one, in place of the one before. If there is no room
/// for it, it is dropped.
#[inline(always)]
fn demote_entry(
    table: &impl UdpNatTable,
    cookie: u64,
    known: &UdpNatEntry,
    SockNat { service, backend }: &SockNat,
) {
    let key = UdpNatKey::previous(cookie, *service);
    if known.used == PREVIOUS {
        let previous = table.get(&key).map_or(SockAddr::UNSET, |it| it.peer);
        if previous != *backend {
            remove_reverse(table, cookie, service, &previous);
        }
        table.update(&key, |it| it.peer = known.peer);
    } else if table.insert(&key, known) {
        // It is linked behind the entry that it was copied from.
        table.update(&UdpNatKey::service(cookie, *service), |it| {
            it.next = *service;
            it.used = PREVIOUS;
        });
    } else {
        remove_reverse(table, cookie, service, &known.peer);
    }
}

/// Removes the reverse entry of a backend, unless another Service address has used the backend since.
#[inline(always)]
fn remove_reverse(table: &impl UdpNatTable, cookie: u64, service: &SockAddr, backend: &SockAddr) {
    let key = UdpNatKey::backend(cookie, *backend);
    if table.get(&key).is_some_and(|it| it.peer == *service) {
        table.remove(&key);
    }
}

#[inline(always)]
fn insert_reverse(
    cache: &UdpNatCache,
    table: &impl UdpNatTable,
    cookie: u64,
    &SockNat { service, backend }: &SockNat,
) -> bool {
    let (key, used) = (UdpNatKey::backend(cookie, backend), cache.clock);
    table.update(&key, |it| {
        it.peer = service;
        it.used = used;
    }) || table.insert(&key, &UdpNatEntry { peer: service, used, ..UdpNatEntry::default() })
}

/// Removes every translation to `backend`: the socket talks to it directly now.
#[inline(always)]
pub fn remove(cache: &mut UdpNatCache, table: &impl UdpNatTable, backend: &SockAddr) {
    cache.remove(backend);
    if cache.overflow_count != 0 {
        table.remove(&UdpNatKey::backend(table.cookie(), *backend));
    }
}

/// Shows user space the translation of a connected UDP socket without a slot, whose storage user space cannot read. Without
/// room the socket is not terminated when its backend is removed; nothing else is lost. The probes' backend never is.
#[inline(always)]
pub fn insert_connected(table: &impl UdpNatTable, SockNat { service, backend }: &SockNat) {
    if !table.has_release_hook() {
        return;
    }
    if probe::is_probe(service.ip) {
        return remove_connected(table);
    }
    let key = UdpNatKey::connected(table.cookie());
    let exists = table.update(&key, |it| {
        it.peer = *backend;
        it.next = *service;
    });
    if !exists {
        table.insert(&key, &UdpNatEntry { peer: *backend, next: *service, ..UdpNatEntry::default() });
    }
}

/// Removes what [`insert_connected`] has inserted: the socket is connected elsewhere now.
#[inline(always)]
pub fn remove_connected(table: &impl UdpNatTable) {
    table.remove(&UdpNatKey::connected(table.cookie()));
}

/// Removes the entries of a closed socket; false if some leaked, which its head then says.
#[inline(always)]
pub fn release(table: &impl UdpNatTable) -> bool {
    let cookie = table.cookie();
    table.remove(&UdpNatKey::connected(cookie));
    let head = UdpNatKey::head(cookie);
    let Some(first) = table.get(&head) else { return true };
    let mut key = UdpNatKey::service(cookie, first.peer);
    let mut deleted = 0;
    // An iteration has no branch but the exits: for any other, the verifier of Linux 5.15 explores both ways again in every
    // later iteration, and gives up.
    for _ in 0..MAX_RELEASED {
        if key.address.is_unset() {
            break;
        }
        let Some(entry) = table.get(&key) else { break };
        deleted += table.delete(&UdpNatKey::backend(cookie, entry.peer));
        deleted += table.delete(&key);
        key.address = entry.next;
        key.kind = SERVICE | entry.used;
    }
    table.count_deleted(deleted);
    if key.address.is_unset() {
        table.remove(&head);
        return true;
    }
    table.update(&head, |it| it.used = 1);
    false
}

/// Of all entries, those leaked by closed sockets.
#[cfg(feature = "user")]
pub fn leaked(entries: &[(UdpNatKey, UdpNatEntry)]) -> impl Iterator<Item = &UdpNatKey> {
    let heads = entries.iter().filter(|(key, entry)| key.kind == HEAD && entry.used == 1);
    let closed: std::collections::HashSet<u64> = heads.map(|(key, _)| key.cookie).collect();
    entries.iter().map(|(key, _)| key).filter(move |it| closed.contains(&it.cookie))
}

const _: () = assert!(size_of::<UdpNatKey>() == 32);
const _: () = assert!(size_of::<UdpNatEntry>() == 48);

#[cfg(test)]
mod tests;
