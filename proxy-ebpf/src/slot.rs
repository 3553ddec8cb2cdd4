//! The slots of sockets.
//!
//! Invariant: a slot belongs to one socket from its claim to the socket's release; nothing takes it away. A network namespace
//! has its share of them: pods open as many sockets as they like.
//! Cookies are assigned in sequence, so that sockets of the same time have adjacent slots.

use aya_ebpf::{EbpfContext, programs::SockAddrContext};
use proxy_common::{
    health::{Watch, client},
    net::Be16,
    sock_nat::{NatSlot, share_cell, slot_share},
};

use crate::{
    atomic,
    config::SLOT_MASK,
    ctx, log,
    maps::{SLOT_SHARES, SLOTS},
};

#[derive(Clone, Copy)]
pub(crate) struct SlotRef {
    pub(crate) cookie: u64,
    slot: *mut NatSlot,
    /// The cookie of the socket that owns the slot, or owned it last. Whether that is this socket cannot change during a
    /// system call, but for a claim.
    owner: u64,
}

impl SlotRef {
    pub(crate) const UNKNOWN: Self = Self { cookie: 0, slot: core::ptr::null_mut(), owner: 0 };

    #[inline(always)]
    pub(crate) fn known(self) -> Option<Self> {
        (!self.slot.is_null()).then_some(self)
    }

    #[inline(always)]
    pub(crate) fn of(ctx: &impl EbpfContext) -> Option<Self> {
        let cookie = ctx::cookie(ctx);
        let slot = SLOTS.get_ptr_mut(cookie as u32 & SLOT_MASK.load())?;
        // SAFETY: a slot of an array is never freed; volatile, so that it is read here and not where it is needed.
        let owner = unsafe { (&raw const (*slot).cookie).read_volatile() };
        Some(Self { cookie, slot, owner })
    }

    /// The slot, if this socket owns it.
    #[inline(always)]
    pub(crate) fn own(&self) -> Option<&'static mut NatSlot> {
        // SAFETY: a slot of an array is never freed. Only its owner accesses its translation, and hooks of one socket take
        // turns.
        if self.owner == self.cookie { Some(unsafe { &mut *self.slot }) } else { None }
    }

    /// Claims the slot, if it is free and the socket's network namespace has not used up its share.
    ///
    /// A socket that increments the claims and then reads 1 owns the slot: of two concurrent ones at most one reads 1. (Both
    /// may fail, and use the overflow table.)
    #[inline(always)]
    pub(crate) fn claim(&mut self, ctx: &SockAddrContext) {
        let client = client(ctx::netns(ctx));
        let Some(used) = SLOT_SHARES.get_ptr_mut(share_cell(client)) else { return };
        // SAFETY: a slot of an array is never freed.
        if unsafe { used.read_volatile() } >= slot_share(SLOT_MASK.load() + 1) {
            log::slot_denied(ctx);
            return;
        }
        // SAFETY: as above.
        let claims = unsafe { &raw mut (*self.slot).claims };
        atomic::add32(claims, 1);
        // SAFETY: as above; volatile, so that it is read after the addition.
        if unsafe { claims.read_volatile() } != 1 {
            log::slot_denied(ctx);
            return atomic::add32(claims, u32::MAX);
        }
        log::slot_claimed(ctx);
        atomic::add(used, 1);
        self.owner = self.cookie;
        // SAFETY: the only claimant owns the slot.
        let slot = unsafe { &mut *self.slot };
        // Port 0 alone says that there is no translation; the whole address would be cleared by a call, byte by byte.
        slot.nat.backend.port = Be16::new(0);
        slot.watch = Watch::NONE;
        slot.client = client;
        slot.cookie = self.cookie;
    }

    /// The number of sockets that this slot was not enough for.
    #[inline(always)]
    pub(crate) fn overflowed(&self) -> *mut u32 {
        // SAFETY: the pointer is not read here.
        unsafe { &raw mut (*self.slot).overflowed }
    }

    /// Frees the slot, if this socket owns it: it is released.
    #[inline(always)]
    pub(crate) fn free(&self) {
        let Some(own) = self.own() else { return };
        if let Some(used) = SLOT_SHARES.get_ptr_mut(share_cell(own.client)) {
            atomic::add(used, u64::MAX);
        }
        // The cookie stays: it matches no socket from now on, as the kernel never reuses one. Clearing it could undo the
        // claim of the next owner.
        atomic::add32(&raw mut own.claims, u32::MAX);
    }
}
