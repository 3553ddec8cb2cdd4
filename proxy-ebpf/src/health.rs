//! The records of failures.
//!
//! Invariant: nothing is looked up while there is no record.

use aya_ebpf::{bindings::BPF_NOEXIST, programs::SockContext};
use proxy_common::{
    health::{Cause, FailureRecord, HAS_RECORDS, MIN_GIVEN_UP_TIME, key},
    sock_nat::NatSlot,
};

use crate::{
    atomic,
    config::{EJECTION_TIME, MAX_EJECTION_TIME},
    ctx::{self, TCP_SYN_SENT},
    kernel_sock,
    log::{self, LogContext},
    maps::{CONNECTING, FAILURES, HEALTH},
};

// SAFETY of every access to a record below: several connections of a client may write at once, and an evicted record may be
// reused meanwhile. Whatever becomes of it, a backend is avoided for a bounded time.

#[inline(always)]
pub(crate) fn has_records() -> bool {
    word(HAS_RECORDS) != 0
}

#[inline(always)]
pub(crate) fn word(index: u32) -> u64 {
    // SAFETY: a slot of an array is never freed.
    HEALTH.get_ptr(index).map_or(0, |it| unsafe { it.read_volatile() })
}

/// Makes the `sock_ops` program watch the connection that this CPU is about to begin.
#[inline(always)]
pub(crate) fn watch(cookie: u64) {
    if let Some(connecting) = CONNECTING.get_ptr_mut(0) {
        // SAFETY: a slot of an array is never freed.
        unsafe { connecting.write(cookie) };
    }
}

/// Whether [`watch`] was called for this socket since the last call. No other socket connects on this CPU in between, except
/// after a preemption: then the connection is not watched.
#[inline(always)]
pub(crate) fn take_watch(cookie: u64) -> bool {
    let Some(connecting) = CONNECTING.get_ptr_mut(0) else { return false };
    // SAFETY: a slot of an array is never freed.
    let is_watched = unsafe { connecting.read_volatile() } == cookie;
    if is_watched {
        // SAFETY: as above.
        unsafe { connecting.write_volatile(0) };
    }
    is_watched
}

#[inline(always)]
pub(crate) fn succeeded(slot: &NatSlot) {
    if slot.watch.is_pending() && has_records() {
        let _ = FAILURES.remove(key(slot.client, slot.watch.backend()));
    }
}

/// A socket is released: if the program gives up a connection that was unanswered for long, it has failed. Its program may never
/// wait until the first segment is sent again.
#[inline(always)]
pub(crate) fn given_up(ctx: &SockContext, slot: &mut NatSlot) {
    if slot.watch.failures() != 0
        && ctx::released_state(ctx) == TCP_SYN_SENT
        && kernel_sock::time_since_syn(ctx) >= MIN_GIVEN_UP_TIME
    {
        failed(ctx, slot, Cause::Timeout);
    }
}

#[inline(always)]
pub(crate) fn failed(ctx: &impl LogContext, slot: &mut NatSlot, cause: Cause) {
    let (client, watch) = (slot.client, slot.watch);
    if watch.failures() == 0 {
        return;
    }
    slot.watch = watch.failed();
    let key = key(client, watch.backend());
    let record = FAILURES.get_ptr_mut(key).or_else(|| {
        // Another CPU may be faster.
        let _ = FAILURES.insert(&key, &FailureRecord::default(), u64::from(BPF_NOEXIST));
        FAILURES.get_ptr_mut(key)
    });
    let (Some(record), Some(has_records)) = (record, HEALTH.get_ptr_mut(HAS_RECORDS)) else { return };
    // SAFETY: a slot of an array is never freed.
    unsafe { has_records.write_volatile(1) };
    // SAFETY: see above.
    let record = unsafe { &mut *record };
    let is_ejected =
        record.fail(ctx::now(), cause, watch.failures(), EJECTION_TIME.load(), MAX_EJECTION_TIME.load());
    log::endpoint_failed(ctx, record.failures(), is_ejected);
    if is_ejected && let Some(count) = HEALTH.get_ptr_mut(cause.word()) {
        atomic::add(count, 1);
    }
}
