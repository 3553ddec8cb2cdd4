//! The translation of a connected socket: kept in the slot that its cookie leads to, or else in the overflow table.
//!
//! Invariant: it lasts until the socket connects again or is released; no other socket takes it away.

use aya_ebpf::programs::{SockAddrContext, SockContext};
use proxy_common::{
    health::Watch,
    net::SockAddr,
    overflow::{self, OverflowTable as _},
    sock_nat::SockNat,
    tables::TCP,
};

use crate::{
    backend_states,
    config::KERNEL_TCP,
    ctx, health, log,
    overflow::{Table, count_leak, count_refusal},
    slot::SlotRef,
    sock_owner::{is_kernel_socket, is_subflow},
};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Insertion {
    /// It is stored, or the socket can do without: a TCP socket then shows the backend's address as its peer.
    Done,
    /// There is no room for it, and the socket must not be redirected: its replies would bear the backend's address.
    NoRoom,
    /// The socket is the kernel's own and has to be left to the packet path.
    NotOurs,
}

/// Stores a translation until the next connect of the socket, or its release. A connection whose translation is in the
/// overflow table is not watched.
#[inline(always)]
pub(crate) fn insert(ctx: &SockAddrContext, slot: &mut SlotRef, nat: &SockNat, watch: Watch) -> Insertion {
    let is_tcp = ctx::protocol(ctx) == TCP;
    if slot.own().is_none() {
        if is_kernel_socket(ctx) {
            let is_served = is_tcp && (KERNEL_TCP.load() != 0 || is_subflow(ctx));
            return if is_served { Insertion::Done } else { Insertion::NotOurs };
        }
        slot.claim(ctx);
    } else {
        log::slot_owned(ctx);
    }
    let table = Table::of_connected(ctx, slot, is_tcp);
    if let Some(own) = slot.own()
        && (!own.is_unconnected() || own.nat.backend.is_unset())
    {
        backend_states::replace(own.watch, watch);
        own.watch = watch;
        own.nat = *nat;
        if watch.failures() != 0 {
            health::watch(slot.cookie);
        }
        if table.is_in_use() {
            overflow::remove_connected(&table);
        }
        return Insertion::Done;
    }
    if overflow::insert_connected(&table, nat) {
        log::overflow_stored(ctx);
        return Insertion::Done;
    }
    log::overflow_full(ctx);
    count_refusal(ctx);
    if is_tcp { Insertion::Done } else { Insertion::NoRoom }
}

/// For a socket that is connected elsewhere now.
#[inline(always)]
pub(crate) fn remove(ctx: &SockAddrContext, slot: &SlotRef) {
    if let Some(own) = slot.own()
        && !own.is_unconnected()
    {
        backend_states::replace(own.watch, Watch::NONE);
        own.watch = Watch::NONE;
        own.nat = SockNat::default();
    }
    let table = Table::new(ctx, slot);
    if table.is_in_use() {
        overflow::remove_connected(&table);
    }
}

/// The translation of a connected socket; unset if its connect was not translated.
#[inline(always)]
pub(crate) fn lookup(ctx: &SockAddrContext, slot: &SlotRef) -> SockNat {
    if let Some(own) = slot.own() {
        let nat = own.connected();
        if !nat.backend.is_unset() {
            return nat;
        }
    }
    overflow::connected(&Table::new(ctx, slot))
}

/// Frees the slot of a socket that is released, and its entries in the overflow table.
#[inline(always)]
pub(crate) fn release(ctx: &SockContext) {
    let Some(slot) = SlotRef::of(ctx) else { return };
    let table = Table::new(ctx, &slot);
    if table.is_in_use() {
        let backend = slot.own().map_or(SockAddr::UNSET, |it| it.unconnected().backend);
        if !overflow::release(&table, backend) {
            count_leak();
        }
        log::overflow_released(ctx);
    }
    if let Some(own) = slot.own() {
        health::given_up(ctx, own);
        backend_states::replace(own.watch, Watch::NONE);
    }
    slot.free();
    log::slot_freed(ctx);
}
