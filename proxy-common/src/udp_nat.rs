//! The translations of an unconnected UDP socket: that of its first Service address is in its slot, all others are in the
//! [`overflow`](crate::overflow) table.
//!
//! Invariant: without room for its translation a datagram is not redirected, as the reply would show the backend as its source.
//! A Service address in the table has an entry with its current backend. A Service address whose backend has changed has one
//! with its previous backend, which may still reply. These are linked into a chain, so that the release of the socket finds
//! them all. Each backend of a node, and a backend that several addresses share, has a reverse entry with the Service address
//! whose reply it sends; one that only the slot names needs none.

use crate::{
    health::Watch,
    net::SockAddr,
    overflow::{BACKEND, OverflowEntry, OverflowTable, PREVIOUS, SERVICE, link_node},
    sock_nat::{NatSlot, SockNat},
};

/// The current backend of `service`; unset if the socket never sent there. `slot` is the socket's own, if it has one.
#[inline(always)]
pub fn backend_of(slot: Option<&NatSlot>, table: &impl OverflowTable, service: &SockAddr) -> SockAddr {
    let nat = slot.map_or(SockNat::default(), NatSlot::unconnected);
    if nat.service == *service {
        return nat.backend;
    }
    if !table.is_in_use() {
        return SockAddr::UNSET;
    }
    table.get(&table.key(SERVICE, *service)).map_or(SockAddr::UNSET, |it| it.peer)
}

/// The Service address that a reply from `backend` belongs to: of several, the one used last; unset if none.
#[inline(always)]
pub fn service_of(slot: Option<&NatSlot>, table: &impl OverflowTable, backend: &SockAddr) -> SockAddr {
    if table.is_in_use()
        && let Some(entry) = table.get(&table.key(BACKEND, *backend))
    {
        return entry.peer;
    }
    let nat = slot.map_or(SockNat::default(), NatSlot::unconnected);
    if nat.backend == *backend { nat.service } else { SockAddr::UNSET }
}

/// Stores `nat`, and demotes the current translation of the same Service address to the previous one: its backend may have
/// sent a reply already. A previous translation without room is dropped.
/// False if there is no room: then nothing may be sent, as the reply would show the backend as its source.
#[inline(always)]
pub fn insert(slot: Option<&mut NatSlot>, table: &impl OverflowTable, nat: &SockNat) -> bool {
    let SockNat { service, backend } = nat;
    let key = table.key(SERVICE, *service);
    let known = match table.is_in_use() {
        true => table.get(&key).unwrap_or_default(),
        false => OverflowEntry::default(),
    };
    // An address in the table stays there: only the release of the socket unlinks an entry.
    if known.peer.is_unset()
        && let Some(slot) = slot
    {
        let before = slot.nat;
        let is_current = slot.is_unconnected() && before.service == *service;
        if is_current || before.backend.is_unset() {
            slot.watch = Watch::UNCONNECTED;
            slot.nat = *nat;
            if is_current && before.backend != *backend {
                let last = table.key(BACKEND, before.backend);
                if demote(table, service, &before.backend, backend) && table.get(&last).is_none() {
                    table.insert(&last, &OverflowEntry { peer: *service, ..OverflowEntry::default() });
                }
            }
            if table.is_in_use() {
                let reverse = table.key(BACKEND, *backend);
                table.update(&reverse, |it| it.peer = *service);
            }
            return true;
        }
    }
    if known.peer.is_unset() {
        return link_node(table, &key, *backend) && insert_reverse(table, nat);
    }
    if known.peer != *backend {
        demote(table, service, &known.peer, backend);
        table.update(&key, |it| it.peer = *backend);
    }
    if insert_reverse(table, nat) {
        return true;
    }
    remove_reverse(table, service, &known.peer);
    insert_reverse(table, nat)
}

/// Keeps the backend that a Service address had until now as its previous one, in place of the one before; false if there is
/// no room.
#[inline(always)]
fn demote(table: &impl OverflowTable, service: &SockAddr, last: &SockAddr, now: &SockAddr) -> bool {
    let key = table.key(PREVIOUS, *service);
    let before = match table.is_in_use() {
        true => table.get(&key).map_or(SockAddr::UNSET, |it| it.peer),
        false => SockAddr::UNSET,
    };
    if before.is_unset() {
        let is_linked = link_node(table, &key, *last);
        if !is_linked {
            remove_reverse(table, service, last);
        }
        return is_linked;
    }
    if before != *now && before != *last {
        remove_reverse(table, service, &before);
    }
    table.update(&key, |it| it.peer = *last)
}

#[inline(always)]
fn insert_reverse(table: &impl OverflowTable, &SockNat { service, backend }: &SockNat) -> bool {
    let key = table.key(BACKEND, backend);
    table.update(&key, |it| it.peer = service)
        || table.insert(&key, &OverflowEntry { peer: service, ..OverflowEntry::default() })
}

/// Removes the reverse entry of a backend, unless another Service address has used the backend since.
#[inline(always)]
fn remove_reverse(table: &impl OverflowTable, service: &SockAddr, backend: &SockAddr) {
    let key = table.key(BACKEND, *backend);
    if table.get(&key).is_some_and(|it| it.peer == *service) {
        table.remove(&key);
    }
}

/// Removes every translation to `backend`: the socket talks to it directly now.
#[inline(always)]
pub fn remove(slot: Option<&mut NatSlot>, table: &impl OverflowTable, backend: &SockAddr) {
    if let Some(slot) = slot
        && slot.is_unconnected()
        && slot.nat.backend == *backend
    {
        slot.nat = SockNat::default();
    }
    if table.is_in_use() {
        table.remove(&table.key(BACKEND, *backend));
    }
}

#[cfg(test)]
mod tests;
