//! The translations of an unconnected UDP socket: that of its first Service address in its slot, the others in the overflow
//! table.
//!
//! Invariant: without room for its translation a datagram is not redirected, as the reply would show the backend as its source.

use aya_ebpf::programs::SockAddrContext;
use proxy_common::{net::SockAddr, sock_nat::SockNat, udp_nat};

use crate::{
    log,
    overflow::{Table, count_refusal},
    slot::SlotRef,
    sock_nat::Insertion,
    sock_owner::is_kernel_socket,
};

/// The current backend of `service`; unset if this socket never sent there.
#[inline(always)]
pub(crate) fn backend_of(ctx: &SockAddrContext, slot: &SlotRef, service: &SockAddr) -> SockAddr {
    udp_nat::backend_of(slot.own().as_deref(), &Table::new(ctx, slot), service)
}

/// The Service address that a reply from `backend` to this socket belongs to; unset if none.
#[inline(always)]
pub(crate) fn service_of(ctx: &SockAddrContext, slot: &SlotRef, backend: &SockAddr) -> SockAddr {
    udp_nat::service_of(slot.own().as_deref(), &Table::new(ctx, slot), backend)
}

#[inline(always)]
pub(crate) fn insert(ctx: &SockAddrContext, slot: &mut SlotRef, nat: &SockNat) -> Insertion {
    if slot.own().is_none() {
        if is_kernel_socket(ctx) {
            return Insertion::NotOurs;
        }
        slot.claim(ctx);
    } else {
        log::slot_owned(ctx);
    }
    if udp_nat::insert(slot.own(), &Table::new(ctx, slot), nat) {
        return Insertion::Done;
    }
    log::overflow_full(ctx);
    count_refusal(ctx);
    Insertion::NoRoom
}

/// Removes the translations to `destination`: the socket sends there directly now, and the replies belong to no Service any
/// more.
#[inline(always)]
pub(crate) fn remove(ctx: &SockAddrContext, slot: &SlotRef, destination: &SockAddr) {
    udp_nat::remove(slot.own(), &Table::new(ctx, slot), destination);
}
