//! The one way to read a generation: [`Side`].
//!
//! Invariant: the active-side word is read exactly once per decision; everything after uses the side it named.

use core::marker::PhantomData;

use proxy_common::{
    choice::{self, Choice},
    counters::CounterIndex,
    decide::Tables,
    net::{Be16, V4, V6},
    tables::{Family, Frontend, FrontendOptions, NodeAddrScope, NodePortKey, Prefilter},
};

use crate::{
    backend_states::States,
    maps::{
        ACTIVE, BACKENDS4, BACKENDS6, Backends, FRONTENDS4, FRONTENDS6, Frontends, MEMBERS4, MEMBERS6,
        Members, NODE_ADDRS, NODE_PORTS, PREFILTER,
    },
    notes::Notes,
};

pub(crate) trait FamilyTables: Family {
    fn frontends() -> &'static Frontends<Self>;
    fn backends() -> &'static Backends<Self>;
    fn members() -> &'static Members<Self>;
    /// [`Tables::choose`] with the arguments of [`pack`]; the upper half is what is noted of it.
    fn choose(arguments: [u64; 4]) -> u64;
}

macro_rules! family_tables {
    ($family:ty, $frontends:ident, $backends:ident, $members:ident, $choose:ident) => {
        impl FamilyTables for $family {
            #[inline(always)]
            fn frontends() -> &'static Frontends<Self> {
                &$frontends
            }

            #[inline(always)]
            fn backends() -> &'static Backends<Self> {
                &$backends
            }

            #[inline(always)]
            fn members() -> &'static Members<Self> {
                &$members
            }

            #[inline(always)]
            fn choose([set, caller, side, first]: [u64; 4]) -> u64 {
                $choose(set, caller, side, first)
            }
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $choose(set: u64, caller: u64, side: u64, first: u64) -> u64 {
            let (choice, side, first) = unpack([set, caller, side, first]);
            choose::<$family>(choice, side, first)
        }
    };
}

family_tables!(V4, FRONTENDS4, BACKENDS4, MEMBERS4, choose4);
family_tables!(V6, FRONTENDS6, BACKENDS6, MEMBERS6, choose6);

/// The side that was active when the decision began, in one address family.
pub(crate) struct Side<F> {
    pub(crate) index: u32,
    family: PhantomData<F>,
    pub(crate) notes: Notes,
}

impl<F> Side<F> {
    #[inline(always)]
    pub(crate) fn active() -> Option<Self> {
        // SAFETY: a slot of an array is never freed; volatile, so that it is one load and not repeated.
        let index = unsafe { ACTIVE.get_ptr(0)?.read_volatile() };
        Some(Self::of(index))
    }

    /// The side that another decision has read.
    #[inline(always)]
    pub(crate) fn of(index: u32) -> Self {
        Self { index, family: PhantomData, notes: Notes::NONE }
    }

    /// The same side in another address family.
    #[inline(always)]
    pub(crate) fn of_family<Other>(&self) -> Side<Other> {
        Side::of(self.index)
    }
}

// SAFETY of every `get` below: user space never writes to the tables of a side that a program may still be reading, so an
// entry neither changes nor is reused under the reference; and it is copied out at once.
// The same holds for the reference to the prefilter.

impl<F: FamilyTables> Tables for Side<F> {
    type Ip = F;

    #[inline(always)]
    fn side(&self) -> u32 {
        self.index
    }

    #[inline(always)]
    fn prefilter(&self) -> Option<&Prefilter> {
        PREFILTER.get(self.index)
    }

    #[inline(always)]
    fn frontend(&self, ip: F, port: Be16, protocol: u8) -> Option<Frontend> {
        // SAFETY: see above.
        unsafe { F::frontends().get(self.index)?.get(ip.frontend_key(port, protocol)) }.copied()
    }

    #[inline(always)]
    fn node_port(&self, port: Be16, protocol: u8) -> Option<Frontend> {
        let key = NodePortKey { port, protocol, ip_version: F::VERSION };
        // SAFETY: see above.
        unsafe { NODE_PORTS.get(self.index)?.get(key) }.copied()
    }

    #[inline(always)]
    fn node_addr_scope(&self, ip: F) -> Option<NodeAddrScope> {
        // SAFETY: see above.
        unsafe { NODE_ADDRS.get(self.index)?.get(ip.node_addr_key()) }.copied()
    }

    #[inline(always)]
    fn backend(&self, position: u32) -> Option<(F::Backend, CounterIndex)> {
        #[cfg(feature = "fault-points")]
        delay();
        Some(F::backend_of(*F::backends().get(self.index)?.get(position)?))
    }

    #[inline(always)]
    fn member(&self, set: u32, backend: F::Backend) -> Option<CounterIndex> {
        // SAFETY: see above.
        unsafe { F::members().get(self.index)?.get(F::member_key(set, backend)) }.copied()
    }

    #[inline(always)]
    fn choose(&self, choice: Choice, first: CounterIndex) -> u32 {
        let chosen = F::choose(pack(choice, self.index, first));
        self.notes.add_packed(chosen);
        chosen as u32
    }
}

/// [`choice::choose`] with the backends of a side.
///
/// Called through functions that are not inlined and have integers as arguments: the verifier checks such a function once,
/// whatever it knows at the call, and follows no path through it any further (Linux 5.6, 51c39bb1d5d1).
#[inline(always)]
fn choose<F: FamilyTables>(choice: Choice, side: u32, first: u32) -> u64 {
    let side = Side::<F>::of(side);
    let counter_at = |position| Some(side.backend(position)?.1);
    let states = States { notes: Notes::NONE };
    states.notes.pack(choice::choose(counter_at, &states, choice, first))
}

#[inline(always)]
const fn pack(choice: Choice, side: u32, first: u32) -> [u64; 4] {
    let Choice { offset, count, max_ejected, options, client, random } = choice;
    [
        (offset as u64) << 32 | count as u64,
        (client as u64) << 32 | random as u64,
        (side as u64) << 32 | (options.bits() as u64) << 16 | max_ejected as u64,
        first as u64,
    ]
}

#[inline(always)]
const fn unpack([set, caller, side, first]: [u64; 4]) -> (Choice, u32, u32) {
    let choice = Choice {
        offset: (set >> 32) as u32,
        count: set as u32,
        max_ejected: side as u8,
        options: FrontendOptions::from_bits((side >> 16) as u16),
        client: (caller >> 32) as u32,
        random: caller as u32,
    };
    (choice, (side >> 32) as u32, first as u32)
}

/// Spends hundreds of microseconds between two steps of a decision: longer than user space takes from a flip to its next
/// write, so that only the grace period separates the two. It copies memory, as the verifier follows each iteration of a
/// loop anew at every call. A function of its own, so that its callers stay as small as in the product: of larger ones the compiler
/// reads results that they have not written, which Linux before 6.3 refuses (6715df8d5d24).
#[cfg(feature = "fault-points")]
#[inline(never)]
fn delay() {
    use crate::{config::SLOW, maps::DELAY};

    if SLOW.load() == 0 {
        return;
    }
    let Some(from) = DELAY.get_ptr(0) else { return };
    for _ in 0..8 {
        // SAFETY: a slot of an array is never freed, and no program writes to this one.
        let _ = DELAY.set(1, unsafe { &*from }, 0);
    }
}
