//! The table of translations that do not fit into the slots of their sockets, as one socket sees it.
//!
//! Invariant: what a network namespace may use is bounded by what the others leave, and each refusal is counted.

use aya_ebpf::{
    EbpfContext, bindings::BPF_NOEXIST, helpers::generated::bpf_get_current_cgroup_id,
    programs::SockAddrContext,
};
use proxy_common::overflow::{
    COLLECTED, DELETED, INSERTED, LEAKED, NetnsUsage, OverflowEntry, OverflowKey, OverflowTable, REFUSED,
    SOCKETS, has_room, tcp_capacity,
};

use crate::{
    atomic,
    config::OVERFLOW_CAPACITY,
    ctx,
    maps::{NETNS_COLLECTED, NETNS_USAGE, OVERFLOW, OVERFLOW_STATS},
    slot::SlotRef,
};

pub(crate) struct Table<'a, C> {
    ctx: &'a C,
    slot: SlotRef,
    /// Whether entries are inserted for a TCP socket.
    is_tcp: bool,
}

impl<'a, C: EbpfContext> Table<'a, C> {
    /// The view of the socket with this slot.
    #[inline(always)]
    pub(crate) fn new(ctx: &'a C, slot: &SlotRef) -> Self {
        Self { ctx, slot: *slot, is_tcp: false }
    }

    /// The view of a connected socket with this slot, which may be a TCP socket.
    #[inline(always)]
    pub(crate) fn of_connected(ctx: &'a C, slot: &SlotRef, is_tcp: bool) -> Self {
        Self { is_tcp, ..Self::new(ctx, slot) }
    }
}

impl<C: EbpfContext> OverflowTable for Table<'_, C> {
    #[inline(always)]
    fn cookie(&self) -> u64 {
        self.slot.cookie
    }

    #[inline(always)]
    fn netns(&self) -> u64 {
        ctx::netns(self.ctx)
    }

    #[inline(always)]
    fn is_in_use(&self) -> bool {
        // SAFETY: a slot of an array is never freed.
        unsafe { self.slot.overflowed().read_volatile() != 0 }
    }

    #[inline(always)]
    fn add_socket(&self) {
        atomic::add32(self.slot.overflowed(), 1);
        count(SOCKETS, 1);
    }

    #[inline(always)]
    fn remove_socket(&self) {
        atomic::add32(self.slot.overflowed(), u32::MAX);
    }

    #[inline(always)]
    fn get(&self, key: &OverflowKey) -> Option<OverflowEntry> {
        // SAFETY: only its own socket changes or removes an entry, under that socket's lock; it is copied out at once.
        unsafe { OVERFLOW.get(key) }.copied()
    }

    #[inline(always)]
    fn update(&self, key: &OverflowKey, change: impl FnOnce(&mut OverflowEntry)) -> bool {
        match OVERFLOW.get_ptr_mut(key) {
            // SAFETY: as above.
            Some(entry) => change(unsafe { &mut *entry }),
            None => return false,
        }
        true
    }

    #[inline(always)]
    fn insert(&self, key: &OverflowKey, entry: &OverflowEntry) -> bool {
        let netns = self.netns();
        let Some(usage) = usage_of(netns) else { return false };
        // SAFETY: user space removes an entry only if it was in no use for seconds, and the memory stays until the program
        // has ended.
        let (inserted, deleted) = unsafe {
            ((&raw const (*usage).inserted).read_volatile(), (&raw const (*usage).deleted).read_volatile())
        };
        // SAFETY: it is copied out at once.
        let collected = unsafe { NETNS_COLLECTED.get(netns) }.copied().unwrap_or(0);
        let used = inserted.saturating_sub(deleted + collected);
        let total = stat(INSERTED).saturating_sub(stat(DELETED) + stat(COLLECTED));
        let capacity = u64::from(OVERFLOW_CAPACITY.load());
        let capacity = if self.is_tcp { tcp_capacity(capacity) } else { capacity };
        if !has_room(used, total, capacity) || OVERFLOW.insert(key, entry, u64::from(BPF_NOEXIST)).is_err() {
            return false;
        }
        count(INSERTED, 1);
        // SAFETY: as above.
        atomic::add(unsafe { &raw mut (*usage).inserted }, 1);
        true
    }

    #[inline(always)]
    fn delete(&self, key: &OverflowKey) -> u64 {
        // Errors are negative. Computed from the sign, as a branch would be one more for the verifier to follow.
        let result = i64::from(OVERFLOW.remove(key).err().unwrap_or(0));
        (!result).cast_unsigned() >> 63
    }

    #[inline(always)]
    fn count_deleted(&self, entries: u64) {
        if entries == 0 {
            return;
        }
        count(DELETED, entries);
        if let Some(usage) = NETNS_USAGE.get_ptr_mut(self.netns()) {
            // SAFETY: as in `insert`.
            atomic::add(unsafe { &raw mut (*usage).deleted }, entries);
        }
    }
}

/// Counts a call that was refused, or a translation that was not stored, and who is responsible.
#[inline(always)]
pub(crate) fn count_refusal(ctx: &SockAddrContext) {
    count(REFUSED, 1);
    if let Some(usage) = usage_of(ctx::netns(ctx)) {
        // SAFETY: as in `insert`.
        unsafe {
            atomic::add(&raw mut (*usage).refused, 1);
            (*usage).cgroup = bpf_get_current_cgroup_id();
        }
    }
}

#[inline(always)]
pub(crate) fn count_leak() {
    count(LEAKED, 1);
}

/// The usage of a network namespace; none if there are too many.
#[inline(always)]
fn usage_of(netns: u64) -> Option<*mut NetnsUsage> {
    NETNS_USAGE.get_ptr_mut(netns).or_else(|| {
        // Another CPU may be faster.
        let _ = NETNS_USAGE.insert(&netns, &NetnsUsage::default(), u64::from(BPF_NOEXIST));
        NETNS_USAGE.get_ptr_mut(netns)
    })
}

#[inline(always)]
fn count(stat: u32, number: u64) {
    if let Some(count) = OVERFLOW_STATS.get_ptr_mut(stat) {
        atomic::add(count, number);
    }
}

#[inline(always)]
fn stat(stat: u32) -> u64 {
    // SAFETY: a slot of an array is never freed.
    OVERFLOW_STATS.get_ptr(stat).map_or(0, |it| unsafe { it.read_volatile() })
}
