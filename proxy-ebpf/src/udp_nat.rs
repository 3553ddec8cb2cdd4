//! The translations of an unconnected UDP socket: the first ones in its own storage, all others in a table that sockets
//! share.
//!
//! Invariant: without room for its translation a datagram is not sent, as the reply would show the backend as its source.

use aya_ebpf::{
    EbpfContext,
    bindings::BPF_NOEXIST,
    programs::{SockAddrContext, SockContext},
};
use proxy_common::{
    net::SockAddr,
    sock_nat::SockNat,
    udp_nat::{self, COLLECTED, DELETED, INSERTED, LEAKED, REFUSED, UdpNatEntry, UdpNatKey, UdpNatTable},
    udp_nat_cache::UdpNatCache,
};

use crate::{
    atomic, ctx,
    maps::{UDP_NAT, UDP_NAT_STATS, UDP_SK_NAT},
    sock_owner::SockOwner,
};

/// The context of a program, which identifies a socket.
pub(crate) trait Socket: EbpfContext {
    /// As [`UdpNatTable::has_release_hook`].
    fn has_release_hook(&self) -> bool;
}

impl Socket for SockAddrContext {
    #[inline(always)]
    fn has_release_hook(&self) -> bool {
        matches!(SockOwner::of(self), SockOwner::Process)
    }
}

impl Socket for SockContext {
    #[inline(always)]
    fn has_release_hook(&self) -> bool {
        true
    }
}

/// The table in the kernel, as one socket sees it.
pub(crate) struct Table<'a, S>(pub(crate) &'a S);

impl<S: Socket> UdpNatTable for Table<'_, S> {
    #[inline(always)]
    fn cookie(&self) -> u64 {
        ctx::cookie(self.0)
    }

    #[inline(always)]
    fn has_release_hook(&self) -> bool {
        self.0.has_release_hook()
    }

    #[inline(always)]
    fn get(&self, key: &UdpNatKey) -> Option<UdpNatEntry> {
        // SAFETY: only its own socket changes or removes an entry, under that socket's lock; it is copied out at once.
        unsafe { UDP_NAT.get(key) }.copied()
    }

    #[inline(always)]
    fn update(&self, key: &UdpNatKey, change: impl FnOnce(&mut UdpNatEntry)) -> bool {
        match UDP_NAT.get_ptr_mut(key) {
            // SAFETY: as above.
            Some(entry) => change(unsafe { &mut *entry }),
            None => return false,
        }
        true
    }

    #[inline(always)]
    fn insert(&self, key: &UdpNatKey, entry: &UdpNatEntry) -> bool {
        let is_inserted = UDP_NAT.insert(key, entry, u64::from(BPF_NOEXIST)).is_ok();
        if is_inserted {
            add(INSERTED, 1);
        }
        is_inserted
    }

    #[inline(always)]
    fn delete(&self, key: &UdpNatKey) -> u64 {
        // Errors are negative. Computed from the sign, as a branch would be one more for the verifier to follow.
        let result = i64::from(UDP_NAT.remove(key).err().unwrap_or(0));
        (!result).cast_unsigned() >> 63
    }

    #[inline(always)]
    fn count_deleted(&self, entries: u64) {
        if entries != 0 {
            add(DELETED, entries);
        }
    }
}

/// The current backend of `service`; unset if this socket never sent there.
#[inline(always)]
pub(crate) fn backend_of(ctx: &SockAddrContext, service: &SockAddr) -> SockAddr {
    cache(ctx).map_or(SockAddr::UNSET, |it| udp_nat::backend_of(it, &Table(ctx), service))
}

/// The Service address that a reply from `backend` to this socket belongs to; unset if none.
#[inline(always)]
pub(crate) fn service_of(ctx: &SockAddrContext, backend: &SockAddr) -> SockAddr {
    cache(ctx).map_or(SockAddr::UNSET, |it| udp_nat::service_of(it, &Table(ctx), backend))
}

/// Stores a translation; false if there is no memory left.
#[inline(always)]
pub(crate) fn insert(ctx: &SockAddrContext, nat: SockNat) -> bool {
    // SAFETY: storage lives as long as its socket, which outlives the program.
    let cache = unsafe { UDP_SK_NAT.get_or_insert_ptr_mut(ctx, None).as_mut() };
    if let Some(cache) = cache
        && udp_nat::insert(cache, &Table(ctx), nat)
    {
        return true;
    }
    add(REFUSED, 1);
    false
}

/// Removes the translations to `destination`: the socket sends there directly now, and the replies belong to no Service any
/// more.
#[inline(always)]
pub(crate) fn remove(ctx: &SockAddrContext, destination: &SockAddr) {
    if let Some(cache) = cache(ctx) {
        udp_nat::remove(cache, &Table(ctx), destination);
    }
}

/// Removes the entries of a socket that is released.
#[inline(always)]
pub(crate) fn release(ctx: &SockContext) {
    // Mostly the table is empty. The insertions are read last: entries that others delete meanwhile then count as present,
    // and this socket's own are never overlooked.
    let removed = stat(DELETED) + stat(COLLECTED);
    if stat(INSERTED) != removed && !udp_nat::release(&Table(ctx)) {
        add(LEAKED, 1);
    }
}

#[inline(always)]
fn cache<'a>(ctx: &SockAddrContext) -> Option<&'a mut UdpNatCache> {
    // SAFETY: as in `insert`.
    unsafe { UDP_SK_NAT.get_ptr_mut(ctx).as_mut() }
}

#[inline(always)]
fn add(stat: u32, number: u64) {
    if let Some(count) = UDP_NAT_STATS.get_ptr_mut(stat) {
        atomic::add(count, number);
    }
}

#[inline(always)]
fn stat(stat: u32) -> u64 {
    // SAFETY: a slot of an array is never freed.
    UDP_NAT_STATS.get_ptr(stat).map_or(0, |it| unsafe { it.read_volatile() })
}
