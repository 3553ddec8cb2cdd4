//! What an unconnected UDP socket remembers of the Service addresses it sent to: the first ones in its own storage, all
//! others in a table that sockets share.
//!
//! The one rule: what cannot be remembered is not sent, for its reply would come from a stranger.

use aya_ebpf::{
    EbpfContext as _,
    helpers::generated::bpf_get_socket_cookie,
    programs::{SockAddrContext, SockContext},
};
use proxy_common::{
    peers::{self, CAME, LEFT, Peer, PeerKey, REFUSED, SWEPT, WENT},
    socket::{Address, Datagrams, Translation},
};

use crate::{
    atomic,
    maps::{DATAGRAMS, PEER_COUNTS, PEERS},
    memory,
    owner::Owner,
};

const BPF_NOEXIST: u64 = 1;

/// A socket, by the context of a program.
trait Socket {
    fn cookie(&self) -> u64;
    fn is_released(&self) -> bool;
}

impl Socket for &SockAddrContext {
    #[inline(always)]
    fn cookie(&self) -> u64 {
        memory::cookie(self)
    }

    #[inline(always)]
    fn is_released(&self) -> bool {
        matches!(Owner::of(self), Owner::Process)
    }
}

impl Socket for &SockContext {
    #[inline(always)]
    fn cookie(&self) -> u64 {
        // SAFETY: the kernel hands over a valid context.
        unsafe { bpf_get_socket_cookie(self.as_ptr()) }
    }

    #[inline(always)]
    fn is_released(&self) -> bool {
        true
    }
}

/// The table in the kernel, as a socket sees it.
struct Shared<S>(S);

impl<S: Socket> peers::Peers for Shared<S> {
    #[inline(always)]
    fn cookie(&self) -> u64 {
        self.0.cookie()
    }

    #[inline(always)]
    fn is_released(&self) -> bool {
        self.0.is_released()
    }

    #[inline(always)]
    fn get(&self, key: &PeerKey) -> Option<Peer> {
        // SAFETY: only its own socket changes or removes an entry, under that socket's lock; it is copied out at once.
        unsafe { PEERS.get(key) }.copied()
    }

    #[inline(always)]
    fn update(&self, key: &PeerKey, change: impl FnOnce(&mut Peer)) -> bool {
        match PEERS.get_ptr_mut(key) {
            // SAFETY: as above.
            Some(peer) => change(unsafe { &mut *peer }),
            None => return false,
        }
        true
    }

    #[inline(always)]
    fn add(&self, key: &PeerKey, peer: &Peer) -> bool {
        let is_there = PEERS.insert(key, peer, BPF_NOEXIST).is_ok();
        if is_there {
            count(CAME);
        }
        is_there
    }

    #[inline(always)]
    fn take(&self, key: &PeerKey) -> u64 {
        // An error is less than zero. By its sign alone, for a branch of it is one more for the verifier.
        let result = i64::from(PEERS.remove(key).err().unwrap_or(0));
        (!result).cast_unsigned() >> 63
    }

    #[inline(always)]
    fn gone(&self, entries: u64) {
        if entries != 0 {
            add(WENT, entries);
        }
    }
}

/// Where this socket was led when it last sent to `service`; unset if it never did.
#[inline(always)]
pub(crate) fn backend_of(ctx: &SockAddrContext, service: &Address) -> Address {
    match own(ctx) {
        Some(datagrams) => peers::backend_of(datagrams, &Shared(ctx), service),
        None => Address::UNSET,
    }
}

/// The Service address that this socket was asking when `backend` answers; unset if none.
#[inline(always)]
pub(crate) fn service_of(ctx: &SockAddrContext, backend: &Address) -> Address {
    match own(ctx) {
        Some(datagrams) => peers::service_of(datagrams, &Shared(ctx), backend),
        None => Address::UNSET,
    }
}

/// Keeps where the socket is led; false where there is no memory left.
#[inline(always)]
pub(crate) fn remember(ctx: &SockAddrContext, translation: Translation) -> bool {
    // SAFETY: storage lives as long as its socket, which outlives the program.
    let datagrams = unsafe { DATAGRAMS.get_or_insert_ptr_mut(ctx, None).as_mut() };
    if let Some(datagrams) = datagrams
        && peers::remember(datagrams, &Shared(ctx), translation)
    {
        return true;
    }
    count(REFUSED);
    false
}

/// Whatever this socket was led to at `destination`, it goes there on its own account now: answers from there are not a
/// Service's any more.
#[inline(always)]
pub(crate) fn forget(ctx: &SockAddrContext, destination: &Address) {
    if let Some(datagrams) = own(ctx) {
        peers::forget(datagrams, &Shared(ctx), destination);
    }
}

/// Shows user space where a connected socket was led that has no slot.
#[inline(always)]
pub(crate) fn connect(ctx: &SockAddrContext, translation: &Translation) {
    peers::connect(&Shared(ctx), translation);
}

/// Such a socket is connected elsewhere now.
#[inline(always)]
pub(crate) fn disconnect(ctx: &SockAddrContext) {
    peers::disconnect(&Shared(ctx));
}

/// Takes away what a socket that is closed kept in the table.
#[inline(always)]
pub(crate) fn release(ctx: &SockContext) {
    // Most of the time there is nothing at all. What came is read last: whatever of it others take away meanwhile then
    // counts as there, and this socket's own is never overlooked.
    let gone = counted(WENT) + counted(SWEPT);
    if counted(CAME) != gone && !peers::release(&Shared(ctx)) {
        count(LEFT);
    }
}

#[inline(always)]
fn own<'a>(ctx: &SockAddrContext) -> Option<&'a mut Datagrams> {
    // SAFETY: as in `remember`.
    unsafe { DATAGRAMS.get_ptr_mut(ctx).as_mut() }
}

#[inline(always)]
fn count(what: u32) {
    add(what, 1);
}

#[inline(always)]
fn add(what: u32, number: u64) {
    if let Some(count) = PEER_COUNTS.get_ptr_mut(what) {
        atomic::add(count, number);
    }
}

#[inline(always)]
fn counted(what: u32) -> u64 {
    // SAFETY: a slot of an array is never freed.
    PEER_COUNTS.get_ptr(what).map_or(0, |it| unsafe { it.read_volatile() })
}
