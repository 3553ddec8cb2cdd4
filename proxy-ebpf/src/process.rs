//! Who makes the system call, as the decision asks it.

use core::cell::Cell;

use aya_ebpf::{
    helpers::generated::{bpf_get_prandom_u32, bpf_ktime_get_ns},
    programs::SockAddrContext,
};
use proxy_common::{
    affinity::{Affinity, AffinityKey, Client},
    counters,
    decide::{Caller, mix},
    net::V6,
    socket::Address,
};

use crate::{
    atomic,
    counters::Counter,
    ctx,
    maps::{CAME, CLIENTS, seed},
    memory::Memory,
};

const BPF_NOEXIST: u64 = 1;

/// The process, by the context of its system call.
pub(crate) struct Process<'a> {
    ctx: &'a SockAddrContext,
    connects: bool,
    counter: Cell<Counter>,
    memory: Cell<Memory>,
}

impl<'a> Process<'a> {
    /// The one that sends a datagram.
    #[inline(always)]
    pub(crate) fn that_sends(ctx: &'a SockAddrContext) -> Self {
        Self { ctx, connects: false, counter: Cell::new(Counter::NONE), memory: Cell::new(Memory::UNKNOWN) }
    }

    /// The one that connects a socket.
    #[inline(always)]
    pub(crate) fn that_connects(ctx: &'a SockAddrContext) -> Self {
        Self { connects: true, ..Self::that_sends(ctx) }
    }

    /// What the socket remembers.
    #[inline(always)]
    pub(crate) fn memory(&self) -> Option<Memory> {
        self.memory.get().known().or_else(|| Memory::of(self.ctx))
    }

    /// Where what was decided is counted.
    #[inline(always)]
    pub(crate) fn counter(&self) -> Counter {
        self.counter.get()
    }
}

impl Caller for Process<'_> {
    #[inline(always)]
    fn random(&self) -> u32 {
        // One that connects again may have been refused where it was led, and should try elsewhere.
        if let Some(memory) = self.memory.get().known()
            && ctx::was_never_connected(self.ctx)
        {
            return mix(memory.cookie(), seed());
        }
        // SAFETY: the helper takes nothing and touches nothing.
        unsafe { bpf_get_prandom_u32() }
    }

    #[inline(always)]
    fn is_host(&self) -> bool {
        ctx::is_host(self.ctx)
    }

    /// A loopback address says no more than the namespace, and there are too many to be a client each.
    ///
    /// A UDP socket that is connected has a source address in any case, and the kernel does not tell who chose it. It counts
    /// as the kernel's, since hardly any program binds an address and connects twice: one that does is the client of its
    /// namespace from the second connect on, and where it sends to another Service than its peer.
    #[inline(always)]
    fn client(&self) -> Client {
        let source = ctx::source(self.ctx);
        if source == V6::default() || source.is_loopback() || ctx::is_connected(self.ctx) {
            Client::Namespace(ctx::netns(self.ctx))
        } else {
            Client::Address(source)
        }
    }

    #[inline(always)]
    fn now(&self) -> u64 {
        // SAFETY: the helper takes nothing and touches nothing.
        unsafe { bpf_ktime_get_ns() }
    }

    #[inline(always)]
    fn affinity(&self, key: &AffinityKey) -> Affinity {
        // SAFETY: another connection of the client may write meanwhile, and an entry that was forgotten for want of room may
        // be another client's while it is copied. Whatever comes of it, only a member of the set is led to.
        unsafe { CLIENTS.get(key) }.copied().unwrap_or_default()
    }

    #[inline(always)]
    fn keep_affinity(&self, key: &AffinityKey, last: &Affinity, affinity: &Affinity) -> Address {
        if last.used == 0 && CLIENTS.insert(key, affinity, BPF_NOEXIST).is_ok() {
            if let Some(count) = CAME.get_ptr_mut(0) {
                atomic::add(count, 1);
            }
            return affinity.backend;
        }
        // In its place: another entry for a client that is there would cost a third one's, where there is no room.
        let Some(kept) = CLIENTS.get_ptr_mut(key) else {
            // Nothing is to be done where there is no room at all: the next connection is chosen anew.
            return affinity.backend;
        };
        // SAFETY: as in `affinity`.
        let kept = unsafe { &mut *kept };
        if kept.used == last.used {
            *kept = *affinity;
        }
        kept.backend
    }

    #[inline(always)]
    fn will_count(&self, port: counters::Cell) {
        self.counter.set(Counter::of(port));
        // It is seldom in the cache either.
        if self.connects
            && let Some(memory) = Memory::of(self.ctx)
        {
            self.memory.set(memory);
        }
    }
}
