//! The translation of a connected socket: kept in a slot found by its cookie, or else in socket storage.
//!
//! Invariant: a slot belongs to one socket from its claim to the socket's release; nothing takes it away.
//! Creating storage for a socket costs several times what the whole decision does; a slot costs next to nothing. Cookies
//! are assigned in sequence, so that sockets of the same time have adjacent slots.

use aya_ebpf::programs::{SockAddrContext, SockContext};
use proxy_common::{
    sock_nat::{ConnectedNat, NatSlot, SockNat},
    tables::UDP,
    udp_nat::{insert_connected, remove_connected},
};

use crate::{
    atomic,
    config::SLOT_MASK,
    ctx,
    maps::{SK_NAT, SLOT_OVERFLOWS, SLOTS},
    sock_owner::SockOwner,
    udp_nat::Table,
};

/// The slot of a socket that connects.
#[derive(Clone, Copy)]
pub(crate) struct SlotRef {
    cookie: u64,
    slot: *mut NatSlot,
    /// The cookie of the socket that owns the slot, or owned it last. Whether that is this socket cannot change while it
    /// connects.
    owner: u64,
}

impl SlotRef {
    /// Not looked up yet.
    pub(crate) const UNKNOWN: Self = Self { cookie: 0, slot: core::ptr::null_mut(), owner: 0 };

    /// The same, if it was looked up.
    #[inline(always)]
    pub(crate) fn known(self) -> Option<Self> {
        (!self.slot.is_null()).then_some(self)
    }

    /// The cookie of the socket.
    #[inline(always)]
    pub(crate) fn cookie(self) -> u64 {
        self.cookie
    }

    /// The slot of the socket that connects.
    #[inline(always)]
    pub(crate) fn of(ctx: &SockAddrContext) -> Option<Self> {
        let cookie = ctx::cookie(ctx);
        let slot = slot(cookie)?;
        // SAFETY: a slot of an array is never freed; volatile, so that it is read here and not where it is needed.
        let owner = unsafe { (&raw const (*slot).cookie).read_volatile() };
        Some(Self { cookie, slot, owner })
    }
}

/// Stores a translation until the next connect of the socket, or its release.
/// A socket without memory left is connected all the same; it shows the backend's address then.
#[inline(always)]
pub(crate) fn insert(ctx: &SockAddrContext, slot: &SlotRef, nat: &SockNat) {
    let has_slot = slot.owner == slot.cookie
        || match SockOwner::of(ctx) {
            SockOwner::Process => claim(slot.slot, slot.cookie),
            SockOwner::Kernel => false,
            SockOwner::KernelTcp => return,
        };
    if has_slot {
        // SAFETY: the slot is this socket's, and connects of one socket take turns.
        unsafe { (*slot.slot).nat = *nat };
        return;
    }
    // SAFETY: storage lives as long as its socket, which outlives the program.
    if let Some(storage) = unsafe { SK_NAT.get_or_insert_ptr_mut(ctx, None).as_mut() } {
        if storage.nat.backend.is_unset() {
            count_overflow();
        }
        storage.nat = *nat;
        if ctx::protocol(ctx) == UDP {
            insert_connected(&Table(ctx), nat);
        }
    }
}

/// Removes the translation of a socket: it is connected elsewhere now.
#[inline(always)]
pub(crate) fn remove(ctx: &SockAddrContext) {
    let Some(slot) = SlotRef::of(ctx) else { return };
    if slot.owner == slot.cookie {
        // SAFETY: as in `insert`.
        unsafe { (*slot.slot).nat = SockNat::default() };
        return;
    }
    if has_overflowed()
        && let Some(storage) = storage(ctx)
    {
        storage.nat = SockNat::default();
        if ctx::protocol(ctx) == UDP {
            remove_connected(&Table(ctx));
        }
    }
}

/// The translation of a socket; unset, or none, if its connect was not translated.
#[inline(always)]
pub(crate) fn lookup(ctx: &SockAddrContext) -> Option<SockNat> {
    let cookie = ctx::cookie(ctx);
    if let Some(slot) = slot(cookie) {
        // SAFETY: as in `insert`.
        let slot = unsafe { &*slot };
        if slot.cookie == cookie {
            return Some(slot.nat);
        }
    }
    Some(storage(ctx)?.nat)
}

/// Frees the slot of a socket that is released.
#[inline(always)]
pub(crate) fn release(ctx: &SockContext) {
    let cookie = ctx::cookie(ctx);
    if let Some(slot) = slot(cookie) {
        // SAFETY: as in `insert`.
        let slot = unsafe { &mut *slot };
        if slot.cookie == cookie {
            // The cookie stays: it matches no socket from now on, as the kernel never reuses one. Clearing it could undo the
            // claim of the next owner.
            atomic::add(&raw mut slot.claims, u64::MAX);
        }
    }
}

/// Claims a free slot.
///
/// A socket that increments the claims and then reads 1 owns the slot: of two concurrent ones at most one reads 1. (Both
/// may fail, and use socket storage.)
#[inline(always)]
fn claim(slot: *mut NatSlot, cookie: u64) -> bool {
    // SAFETY: a slot of an array is never freed.
    let claims = unsafe { &raw mut (*slot).claims };
    atomic::add(claims, 1);
    // SAFETY: a slot of an array is never freed; volatile, so that it is read after the addition.
    if unsafe { claims.read_volatile() } == 1 {
        // SAFETY: the only claimant owns the slot.
        unsafe { (*slot).cookie = cookie };
        return true;
    }
    atomic::add(claims, u64::MAX);
    false
}

#[inline(always)]
fn slot(cookie: u64) -> Option<*mut NatSlot> {
    SLOTS.get_ptr_mut(cookie as u32 & SLOT_MASK.load())
}

#[inline(always)]
fn storage<'a>(ctx: &SockAddrContext) -> Option<&'a mut ConnectedNat> {
    // SAFETY: storage lives as long as its socket, which outlives the program.
    unsafe { SK_NAT.get_ptr_mut(ctx).as_mut() }
}

#[inline(always)]
fn count_overflow() {
    if let Some(count) = SLOT_OVERFLOWS.get_ptr_mut(0) {
        atomic::add(count, 1);
    }
}

#[inline(always)]
fn has_overflowed() -> bool {
    // SAFETY: a slot of an array is never freed.
    SLOT_OVERFLOWS.get_ptr(0).is_some_and(|it| unsafe { it.read_volatile() } != 0)
}
