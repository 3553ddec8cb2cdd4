//! What a connected socket remembers: kept in a slot found by its cookie, or else in its own storage.
//!
//! The one rule: a slot belongs to one socket from its claim to the socket's release; nothing takes it away.
//! To make storage for a socket costs several times what the whole decision does; a slot costs next to nothing. Cookies
//! are given out in order, so that those of the moment lie side by side.

use aya_ebpf::{
    EbpfContext,
    helpers::generated::bpf_get_socket_cookie,
    programs::{SockAddrContext, SockContext},
};
use proxy_common::{
    socket::{Connected, Slot, Translation},
    tables::UDP,
};

use crate::{
    atomic, ctx, datagrams,
    maps::{CONNECTED, OVERFLOWED, SLOTS, slot_mask},
    owner::Owner,
};

/// Where a socket that connects is remembered.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    cookie: u64,
    slot: *mut Slot,
    /// Who has the slot, or had it last. Whether that is this socket cannot change while it connects.
    owner: u64,
}

impl Memory {
    /// Not looked for yet.
    pub(crate) const UNKNOWN: Self = Self { cookie: 0, slot: core::ptr::null_mut(), owner: 0 };

    /// The same, if it was looked for.
    #[inline(always)]
    pub(crate) fn known(self) -> Option<Self> {
        (!self.slot.is_null()).then_some(self)
    }

    /// The cookie of the socket.
    #[inline(always)]
    pub(crate) fn cookie(self) -> u64 {
        self.cookie
    }

    /// The memory of the socket that connects.
    #[inline(always)]
    pub(crate) fn of(ctx: &SockAddrContext) -> Option<Self> {
        let cookie = cookie(ctx);
        let slot = slot(cookie)?;
        // SAFETY: a slot of an array is never freed; volatile, so that it is read here and not where it is needed.
        let owner = unsafe { (&raw const (*slot).cookie).read_volatile() };
        Some(Self { cookie, slot, owner })
    }
}

/// Keeps a translation for as long as the socket lives, or until the next connect.
/// A socket without memory left is still connected; it shows the backend's address then.
#[inline(always)]
pub(crate) fn remember(ctx: &SockAddrContext, memory: &Memory, translation: &Translation) {
    let has_slot = memory.owner == memory.cookie
        || match Owner::of(ctx) {
            Owner::Process => claim(memory.slot, memory.cookie),
            Owner::Kernel => false,
            Owner::Nobody => return,
        };
    if has_slot {
        // SAFETY: the slot is this socket's, and connects of one socket take turns.
        unsafe { (*memory.slot).translation = *translation };
        return;
    }
    // SAFETY: storage lives as long as its socket, which outlives the program.
    if let Some(connected) = unsafe { CONNECTED.get_or_insert_ptr_mut(ctx, None).as_mut() } {
        if connected.translation.backend.is_unset() {
            count_overflow();
        }
        connected.translation = *translation;
        if ctx::protocol(ctx) == UDP {
            datagrams::connect(ctx, translation);
        }
    }
}

/// Forgets what the socket remembers: it is connected elsewhere now.
#[inline(always)]
pub(crate) fn forget(ctx: &SockAddrContext) {
    let Some(memory) = Memory::of(ctx) else { return };
    if memory.owner == memory.cookie {
        // SAFETY: as in `remember`.
        unsafe { (*memory.slot).translation = Translation::default() };
        return;
    }
    if has_overflowed()
        && let Some(connected) = in_storage(ctx)
    {
        connected.translation = Translation::default();
        if ctx::protocol(ctx) == UDP {
            datagrams::disconnect(ctx);
        }
    }
}

/// What the socket remembers.
#[inline(always)]
pub(crate) fn recall(ctx: &SockAddrContext) -> Option<Translation> {
    let cookie = cookie(ctx);
    if let Some(slot) = slot(cookie) {
        // SAFETY: as in `remember`.
        let slot = unsafe { &*slot };
        if slot.cookie == cookie {
            return Some(slot.translation);
        }
    }
    Some(in_storage(ctx)?.translation)
}

/// Gives the slot back: its socket is being closed.
#[inline(always)]
pub(crate) fn release(ctx: &SockContext) {
    // SAFETY: the kernel hands over a valid context.
    let cookie = unsafe { bpf_get_socket_cookie(ctx.as_ptr()) };
    if let Some(slot) = slot(cookie) {
        // SAFETY: as in `remember`.
        let slot = unsafe { &mut *slot };
        if slot.cookie == cookie {
            // The cookie stays: it means nobody from now on, for the kernel gives out none twice. To clear it could
            // undo the next owner's claim.
            atomic::add(&raw mut slot.claims, u64::MAX);
        }
    }
}

/// Takes a slot that nobody has.
///
/// Who counts himself in and is alone has it: of two that come at once at most one reads 1. (Both may give up, and use
/// their storage.)
#[inline(always)]
fn claim(slot: *mut Slot, cookie: u64) -> bool {
    // SAFETY: a slot of an array is never freed.
    let claims = unsafe { &raw mut (*slot).claims };
    atomic::add(claims, 1);
    // SAFETY: the word is ours to read; volatile, so that it is read after the addition.
    if unsafe { claims.read_volatile() } == 1 {
        // SAFETY: who is alone has the slot.
        unsafe { (*slot).cookie = cookie };
        return true;
    }
    atomic::add(claims, u64::MAX);
    false
}

#[inline(always)]
fn slot(cookie: u64) -> Option<*mut Slot> {
    SLOTS.get_ptr_mut(cookie as u32 & slot_mask())
}

/// The socket's cookie, which no other socket ever has.
#[inline(always)]
pub(crate) fn cookie(ctx: &SockAddrContext) -> u64 {
    // SAFETY: the kernel hands over a valid context.
    unsafe { bpf_get_socket_cookie(ctx.as_ptr()) }
}

#[inline(always)]
fn in_storage<'a>(ctx: &SockAddrContext) -> Option<&'a mut Connected> {
    // SAFETY: storage lives as long as its socket, which outlives the program.
    unsafe { CONNECTED.get_ptr_mut(ctx).as_mut() }
}

#[inline(always)]
fn count_overflow() {
    if let Some(count) = OVERFLOWED.get_ptr_mut(0) {
        atomic::add(count, 1);
    }
}

#[inline(always)]
fn has_overflowed() -> bool {
    // SAFETY: a slot of an array is never freed.
    OVERFLOWED.get_ptr(0).is_some_and(|it| unsafe { it.read_volatile() } != 0)
}
