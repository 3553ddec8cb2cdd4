//! The socket and the process of a system call, as the decision sees them.

use core::cell::Cell;

use aya_ebpf::{bindings::BPF_NOEXIST, helpers::generated::bpf_get_prandom_u32, programs::SockAddrContext};
use proxy_common::{
    affinity::{AffinityEntry, AffinityKey},
    counters::CounterIndex,
    decide::{SocketContext, SocketOrigin, Tables, Verdict, decide},
    net::SockAddr,
    random::mix,
    tables::Frontend,
};

#[cfg(feature = "log")]
use crate::logged_side::LoggedSide;
use crate::{
    atomic,
    config::SEED,
    counters::Counter,
    ctx,
    exclusion::is_excluded,
    health, log,
    maps::{AFFINITY, AFFINITY_INSERTS},
    notes::Notes,
    origin::Origin,
    packet_path, senders,
    side::{FamilyTables, Side},
    slot::SlotRef,
    udp_nat,
};

pub(crate) struct Caller<'a> {
    ctx: &'a SockAddrContext,
    /// Of a send; unset for a connect.
    destination: SockAddr,
    is_excluded: bool,
    pub(crate) connects: bool,
    /// The counters of the service port, once they are prefetched.
    pub(crate) counter: Cell<Counter>,
    slot: Cell<SlotRef>,
    pub(crate) notes: Notes,
}

impl<'a> Caller<'a> {
    #[inline(always)]
    pub(crate) fn for_sendmsg(ctx: &'a SockAddrContext, destination: SockAddr) -> Self {
        Self {
            ctx,
            destination,
            is_excluded: is_excluded(ctx),
            connects: false,
            counter: Cell::new(Counter::NONE),
            slot: Cell::new(SlotRef::UNKNOWN),
            notes: Notes::NONE,
        }
    }

    #[inline(always)]
    pub(crate) fn for_connect(ctx: &'a SockAddrContext) -> Self {
        Self { connects: true, ..Self::for_sendmsg(ctx, SockAddr::UNSET) }
    }

    /// The verdict on the destination `ip`, with the port and protocol of the context; none if there is no generation.
    #[inline(always)]
    pub(crate) fn decide<F: FamilyTables>(&self, ip: F) -> Option<Verdict> {
        let (port, protocol) = (ctx::port(self.ctx), ctx::protocol(self.ctx));
        let side = Side::<F>::active()?;
        #[cfg(not(feature = "log"))]
        let tables = &side;
        #[cfg(feature = "log")]
        let tables = &LoggedSide { side: &side, ctx: self.ctx };
        let verdict = decide(tables, self, ip, port, protocol);
        self.notes.set(side.notes.get());
        Some(verdict)
    }

    #[inline(always)]
    pub(crate) fn slot(&self) -> Option<SlotRef> {
        self.slot.get().known().or_else(|| SlotRef::of(self.ctx))
    }
}

impl SocketContext for Caller<'_> {
    #[inline(always)]
    fn origin(&self) -> impl SocketOrigin {
        Origin { ctx: self.ctx }
    }

    #[inline(always)]
    fn is_excluded(&self) -> bool {
        self.is_excluded
    }

    #[inline(always)]
    fn random(&self) -> u32 {
        // A socket that connects again may have been refused by its backend, and should try another one.
        if let Some(slot) = self.slot.get().known()
            && ctx::was_never_connected(self.ctx)
        {
            return mix(slot.cookie, SEED.load());
        }
        // SAFETY: the helper takes nothing and touches nothing.
        unsafe { bpf_get_prandom_u32() }
    }

    #[inline(always)]
    fn previous_backend(&self) -> SockAddr {
        if self.connects {
            return SockAddr::UNSET;
        }
        self.slot().map_or(SockAddr::UNSET, |slot| udp_nat::backend_of(self.ctx, &slot, &self.destination))
    }

    #[inline(always)]
    fn packets_serve(&self) -> bool {
        packet_path::serves()
    }

    #[inline(always)]
    fn has_just_heard(&self, peer: &SockAddr) -> bool {
        let has_heard = senders::has_just_heard(self.ctx, peer);
        if has_heard {
            log::just_heard(self.ctx);
        }
        has_heard
    }

    #[inline(always)]
    fn is_reached_by_packets_only<T: Tables>(&self, tables: &T, protocol: u8, to_loopback: bool) -> bool {
        Origin { ctx: self.ctx }.is_reached_by_packets_only(tables.side(), protocol, to_loopback)
    }

    #[inline(always)]
    fn netns(&self) -> u64 {
        ctx::netns(self.ctx)
    }

    #[inline(always)]
    fn now(&self) -> u64 {
        ctx::now()
    }

    #[inline(always)]
    fn affinity(&self, key: &AffinityKey) -> AffinityEntry {
        // SAFETY: another connection of the client may write meanwhile, and an evicted entry may be reused for another
        // client while it is copied. Whatever is read, only a member of the set is selected.
        unsafe { AFFINITY.get(key) }.copied().unwrap_or_default()
    }

    #[inline(always)]
    fn update_affinity(&self, key: &AffinityKey, last: &AffinityEntry, entry: &AffinityEntry) -> SockAddr {
        self.notes.on_affinity(self.ctx, last, entry);
        if last.used == 0 && AFFINITY.insert(key, entry, u64::from(BPF_NOEXIST)).is_ok() {
            if let Some(count) = AFFINITY_INSERTS.get_ptr_mut(0) {
                atomic::add(count, 1);
            }
            return entry.backend;
        }
        // Updated in place: inserting an entry for a client that has one would evict a third one's in a full map.
        let Some(stored) = AFFINITY.get_ptr_mut(key) else {
            // There is no room at all: the next connection selects a backend anew.
            return entry.backend;
        };
        // SAFETY: as in `affinity`.
        let stored = unsafe { &mut *stored };
        if stored.used == last.used {
            *stored = *entry;
        }
        stored.backend
    }

    #[inline(always)]
    fn uses_backend_states(&self, frontend: &Frontend) -> bool {
        self.notes.on_frontend(frontend);
        self.connects
            && (frontend.options.is_balanced() || frontend.health.failures != 0 && health::has_records())
    }

    #[inline(always)]
    fn prefetch_socket(&self) {
        // Loads the slot into the cache, where it rarely is.
        if cfg!(not(feature = "trace"))
            && let Some(slot) = SlotRef::of(self.ctx)
        {
            self.slot.set(slot);
        }
    }

    #[inline(always)]
    fn prefetch_counters(&self, port_counter: CounterIndex) {
        self.counter.set(Counter::of(port_counter));
    }
}
