//! Translations that do not fit into the slots of their sockets ([`crate::sock_nat`]): entries of one table that all sockets
//! share, each under its socket's cookie.
//!
//! Invariant: an entry belongs to one socket, and only that socket removes it or its release does; no entry is ever evicted.
//! The number of entries is bounded in all and per network namespace ([`has_room`]), since pods create them.
//! A connected socket has one entry, [`CONNECTED`]. For an unconnected one see [`crate::udp_nat`].
//! The hooks run under the socket's lock, so that two threads on one socket take turns.

use crate::{
    net::{SockAddr, V6},
    sock_nat::SockNat,
};

/// How many chained entries the release of a socket removes. User space collects the rest: the verifier walks through every
/// iteration of a loop.
pub const MAX_RELEASED: u32 = 256;

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct OverflowKey {
    pub cookie: u64,
    /// The Service's address, the backend's, or none.
    pub address: SockAddr,
    /// [`SERVICE`], [`BACKEND`], [`HEAD`], [`CONNECTED`] or [`PREVIOUS`].
    pub kind: u32,
}

/// The entry of a Service address: a node of the socket's chain.
pub const SERVICE: u32 = 1;
/// The reverse entry of a backend.
pub const BACKEND: u32 = 2;
/// The head of a socket's chain.
pub const HEAD: u32 = 3;
/// The entry of a connected socket.
pub const CONNECTED: u32 = 4;
/// The entry of a Service address for its previous backend: a node of the socket's chain.
pub const PREVIOUS: u32 = 5;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct OverflowEntry {
    /// Of a Service address, its current or previous backend; of a backend, the Service address used last; of a connected
    /// socket, the backend; of the head, the cookie of the network namespace, in the first two words of the address.
    pub peer: SockAddr,
    /// Of a node and of the head: the kind of the next node, [`SERVICE`] or [`PREVIOUS`]; 0 at the end of the chain.
    pub next_kind: u32,
    /// Of a node and of the head: the Service address of the next node; unset at the end. Of a connected socket: the Service
    /// address.
    pub next: SockAddr,
    /// Of the head: 1 if the socket is closed and the rest of its entries has leaked, else 0.
    pub is_leaked: u32,
}

impl OverflowKey {
    const fn head(cookie: u64) -> Self {
        Self { cookie, address: SockAddr::UNSET, kind: HEAD }
    }

    pub const fn connected(cookie: u64) -> Self {
        Self { cookie, address: SockAddr::UNSET, kind: CONNECTED }
    }
}

impl OverflowEntry {
    const fn head(netns: u64, next: SockAddr, next_kind: u32) -> Self {
        let ip = V6::from_raw([netns as u32, (netns >> 32) as u32, 0, 0]);
        Self { peer: SockAddr { ip, ..SockAddr::UNSET }, next_kind, next, is_leaked: 0 }
    }

    /// The network namespace that a head names.
    pub const fn netns(&self) -> u64 {
        let [low, high, ..] = self.peer.ip.raw();
        low as u64 | (high as u64) << 32
    }

    /// The translation in the entry of a connected socket.
    pub const fn connected(&self) -> SockNat {
        SockNat { service: self.next, backend: self.peer }
    }
}

/// What is counted, by position: entries ever inserted.
pub const INSERTED: u32 = 0;
pub const DELETED: u32 = 1;
/// Calls that were refused, and connections that show their backend, for want of room.
pub const REFUSED: u32 = 2;
/// Closed sockets that leaked entries.
pub const LEAKED: u32 = 3;
/// Leaked entries that user space collected.
pub const COLLECTED: u32 = 4;
/// Sockets that found no slot.
pub const SOCKETS: u32 = 5;
pub const STAT_COUNT: u32 = 6;

/// What the sockets of one network namespace use. Counts only ever grow.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct NetnsUsage {
    /// Entries ever inserted.
    pub inserted: u64,
    /// Entries that the programs deleted; those that user space collected are counted in a map of its own.
    pub deleted: u64,
    /// Calls and connections, as [`REFUSED`] counts them.
    pub refused: u64,
    /// The cgroup of the process that was refused last, by its id.
    pub cgroup: u64,
}

/// The number of network namespaces whose usage is known at one time. All others are refused.
pub const MAX_NETNS: u32 = 16_384;

/// Whether a network namespace with `used` entries may insert one more into a table with `total` of `capacity` entries: it
/// may have an eighth of what is free (the "dynamic threshold" of Choudhury and Hahne, 1998).
///
/// One namespace alone can use a ninth of the table. Ten greedy ones leave a third of it, and the first entry of another one
/// is refused only by a full table.
#[inline(always)]
pub const fn has_room(used: u64, total: u64, capacity: u64) -> bool {
    used * 8 < capacity.saturating_sub(total)
}

/// How much of the table's capacity the entries of TCP sockets may use: they only show the Service as the peer, and give way to
/// datagrams, which are not sent without an entry.
#[inline(always)]
pub const fn tcp_capacity(capacity: u64) -> u64 {
    capacity / 2
}

/// The table as one socket sees it. Methods that are not called cost nothing.
pub trait OverflowTable {
    fn cookie(&self) -> u64;
    fn netns(&self) -> u64;
    /// Whether a socket with the same slot has entries; if not, no look-up is needed.
    fn is_in_use(&self) -> bool;
    /// Counts one more socket with entries.
    fn add_socket(&self);
    /// Counts one socket with entries less.
    fn remove_socket(&self);
    fn get(&self, key: &OverflowKey) -> Option<OverflowEntry>;
    /// Changes an entry; false if there is none.
    fn update(&self, key: &OverflowKey, change: impl FnOnce(&mut OverflowEntry)) -> bool;
    /// Inserts a new entry; false if there is no room.
    fn insert(&self, key: &OverflowKey, entry: &OverflowEntry) -> bool;
    /// Deletes an entry, if there is one; returns how many that were, 1 or 0, to be passed to
    /// [`OverflowTable::count_deleted`].
    fn delete(&self, key: &OverflowKey) -> u64;
    fn count_deleted(&self, entries: u64);

    /// The key of one of the socket's entries.
    #[inline(always)]
    fn key(&self, kind: u32, address: SockAddr) -> OverflowKey {
        OverflowKey { cookie: self.cookie(), address, kind }
    }

    #[inline(always)]
    fn remove(&self, key: &OverflowKey) {
        self.count_deleted(self.delete(key));
    }
}

/// Inserts a node at the head of the socket's chain; false if there is no room.
#[inline(always)]
pub(crate) fn link_node(table: &impl OverflowTable, key: &OverflowKey, peer: SockAddr) -> bool {
    let head = OverflowKey::head(key.cookie);
    let (next, next_kind) = table.get(&head).map_or((SockAddr::UNSET, 0), |it| (it.next, it.next_kind));
    if !table.insert(key, &OverflowEntry { peer, next_kind, next, is_leaked: 0 }) {
        return false;
    }
    let (address, kind) = (key.address, key.kind);
    let is_linked = table.update(&head, |it| {
        it.next = address;
        it.next_kind = kind;
    });
    if is_linked {
        return true;
    }
    if table.insert(&head, &OverflowEntry::head(table.netns(), address, kind)) {
        table.add_socket();
        return true;
    }
    table.remove(key);
    false
}

/// The translation of a connected socket; unset if it has none here.
#[inline(always)]
pub fn connected(table: &impl OverflowTable) -> SockNat {
    if !table.is_in_use() {
        return SockNat::default();
    }
    table.get(&OverflowKey::connected(table.cookie())).map_or(SockNat::default(), |it| it.connected())
}

/// Stores the translation of a connected socket; false if there is no room.
#[inline(always)]
pub fn insert_connected(table: &impl OverflowTable, &SockNat { service, backend }: &SockNat) -> bool {
    let key = OverflowKey::connected(table.cookie());
    let is_updated = table.update(&key, |it| {
        it.peer = backend;
        it.next = service;
    });
    if is_updated {
        return true;
    }
    let is_inserted =
        table.insert(&key, &OverflowEntry { peer: backend, next: service, ..OverflowEntry::default() });
    if is_inserted {
        table.add_socket();
    }
    is_inserted
}

/// Removes what [`insert_connected`] has stored: the socket is connected elsewhere now.
#[inline(always)]
pub fn remove_connected(table: &impl OverflowTable) {
    let deleted = table.delete(&OverflowKey::connected(table.cookie()));
    if deleted != 0 {
        table.count_deleted(deleted);
        table.remove_socket();
    }
}

/// Removes the entries of a closed socket; false if some leaked, which its head then says. `backend` is the one in the slot
/// of an unconnected socket, or unset.
#[inline(always)]
pub fn release(table: &impl OverflowTable, backend: SockAddr) -> bool {
    remove_connected(table);
    let cookie = table.cookie();
    let head = OverflowKey::head(cookie);
    let Some(first) = table.get(&head) else { return true };
    let mut key = OverflowKey { cookie, address: first.next, kind: first.next_kind };
    let mut deleted = table.delete(&OverflowKey { cookie, address: backend, kind: BACKEND });
    // An iteration has no branch but the exits: for any other, the verifier of Linux 5.15 explores both ways again in every
    // later iteration, and gives up.
    for _ in 0..MAX_RELEASED {
        if key.address.is_unset() {
            break;
        }
        let Some(entry) = table.get(&key) else { break };
        deleted += table.delete(&OverflowKey { cookie, address: entry.peer, kind: BACKEND });
        deleted += table.delete(&key);
        key.address = entry.next;
        key.kind = entry.next_kind;
    }
    table.count_deleted(deleted);
    table.remove_socket();
    if key.address.is_unset() {
        table.remove(&head);
        return true;
    }
    table.update(&head, |it| it.is_leaked = 1);
    false
}

/// Of all entries, those leaked by closed sockets, and the network namespace of each.
#[cfg(feature = "user")]
pub fn leaked(entries: &[(OverflowKey, OverflowEntry)]) -> impl Iterator<Item = (&OverflowKey, u64)> {
    let heads = entries.iter().filter(|(key, entry)| key.kind == HEAD && entry.is_leaked == 1);
    let closed: std::collections::HashMap<u64, u64> =
        heads.map(|(key, head)| (key.cookie, head.netns())).collect();
    entries.iter().filter_map(move |(key, _)| Some((key, *closed.get(&key.cookie)?)))
}

const _: () = assert!(size_of::<OverflowKey>() == 32);
const _: () = assert!(size_of::<OverflowEntry>() == 48);
const _: () = assert!(size_of::<NetnsUsage>() == 32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_namespaces_leave_room_for_another() {
        let capacity = 10_000;
        for (greedy, left) in [(1, 8888), (2, 7900), (10, 3078), (30, 288)] {
            let mut total = 0;
            for _ in 0..greedy {
                total += (0..).take_while(|it| has_room(*it, total + it, capacity)).count() as u64;
            }
            assert!(
                (left - 1..=left + 1).contains(&(capacity - total)),
                "{greedy} leave {}",
                capacity - total
            );
            assert!(has_room(0, total, capacity));
        }
        assert!(!has_room(0, capacity, capacity) && !has_room(0, capacity + 1, capacity));
    }

    #[test]
    fn tcp_entries_leave_room_for_datagrams_of_the_same_namespace_and_of_others() {
        let capacity = 10_000;
        for namespaces in [1_u64, 3, 30, 1000] {
            let mut used = vec![0; namespaces as usize];
            let mut total = 0;
            // All take what they get.
            while let Some(next) = used.iter_mut().find(|it| has_room(**it, total, tcp_capacity(capacity))) {
                *next += 1;
                total += 1;
            }
            assert!(total <= capacity / 2, "{namespaces} took {total}");
            for of_tcp in used.into_iter().chain([0]) {
                let room = (0..).take_while(|it| has_room(of_tcp + it, total + it, capacity)).count();
                assert!(room > 50, "beside {of_tcp} of {namespaces} namespaces: {room}");
            }
        }
    }
}
