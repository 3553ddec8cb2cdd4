//! Every map, and the one way to read a generation: [`Side`].

use core::marker::PhantomData;

use aya_ebpf::{
    Global,
    btf_maps::{Array, ArrayOfMaps, HashMap, SkStorage},
    macros::btf_map,
};
use proxy_common::{
    decide::Tables,
    net::{Be16, V4, V6},
    socket::{Connected, Datagrams, Slot},
    tables::{
        Backend4, Backend6, BackendKey, Frontend, FrontendKey4, FrontendKey6, Member, MemberKey4, MemberKey6,
    },
};

/// The side word, 0 or 1: the side whose tables are in force. Beside it user space counts the flips.
#[btf_map]
static ACTIVE: Array<u32, 2> = Array::new();

// The tables, each behind an outer map with a slot per side.
// The size of the inner map here is only a template: user space puts in maps of the size it needs.

#[btf_map]
static FRONTENDS4: ArrayOfMaps<HashMap<FrontendKey4, Frontend, 1>, 2> = ArrayOfMaps::new();
#[btf_map]
static FRONTENDS6: ArrayOfMaps<HashMap<FrontendKey6, Frontend, 1>, 2> = ArrayOfMaps::new();
#[btf_map]
static BACKENDS4: ArrayOfMaps<HashMap<BackendKey, Backend4, 1>, 2> = ArrayOfMaps::new();
#[btf_map]
static BACKENDS6: ArrayOfMaps<HashMap<BackendKey, Backend6, 1>, 2> = ArrayOfMaps::new();
#[btf_map]
static MEMBERS4: ArrayOfMaps<HashMap<MemberKey4, Member, 1>, 2> = ArrayOfMaps::new();
#[btf_map]
static MEMBERS6: ArrayOfMaps<HashMap<MemberKey6, Member, 1>, 2> = ArrayOfMaps::new();

/// What connected sockets remember, by cookie; user space says how many there are, a power of two.
#[btf_map]
pub(crate) static SLOTS: Array<Slot, 1> = Array::new();
/// How many sockets found their slot taken and made storage; zero says that no socket has any.
#[btf_map]
pub(crate) static OVERFLOWED: Array<u64, 1> = Array::new();
/// What a connected socket remembers that has no slot.
#[btf_map]
pub(crate) static CONNECTED: SkStorage<Connected> = SkStorage::new();
/// What an unconnected UDP socket remembers.
#[btf_map]
pub(crate) static DATAGRAMS: SkStorage<Datagrams> = SkStorage::new();

/// Set at load where the kernel has `bpf_set_retval` (5.18); else the verifier drops the branch that calls it.
#[unsafe(no_mangle)]
static SET_RETVAL: Global<u32> = Global::new(0);

/// Whether a program may choose the errno of the system call it ends.
#[inline(always)]
pub(crate) fn can_set_retval() -> bool {
    SET_RETVAL.load() != 0
}

/// One less than there are [`SLOTS`].
#[unsafe(no_mangle)]
static SLOT_MASK: Global<u32> = Global::new(0);

/// Which bits of a cookie say which slot.
#[inline(always)]
pub(crate) fn slot_mask() -> u32 {
    SLOT_MASK.load()
}

/// Set at load where the kernel has `bpf_skc_to_mptcp_sock` (5.19).
#[unsafe(no_mangle)]
static MPTCP: Global<u32> = Global::new(0);

/// Whether a program may ask for the MPTCP socket behind a subflow.
#[inline(always)]
pub(crate) fn can_tell_mptcp() -> bool {
    MPTCP.load() != 0
}

/// The side in force when the decision began. It is read exactly once per decision: everything after goes by it.
pub(crate) struct Side<Ip> {
    index: u32,
    family: PhantomData<Ip>,
}

impl<Ip> Side<Ip> {
    /// Reads the side word.
    #[inline(always)]
    pub(crate) fn active() -> Option<Self> {
        // SAFETY: a slot of an array is never freed; volatile, so that it is one load and not repeated.
        let index = unsafe { ACTIVE.get_ptr(0)?.read_volatile() };
        Some(Self { index, family: PhantomData })
    }
}

/// Spends hundreds of microseconds between two steps of a decision: longer than user space takes from a flip to its next
/// write, so that nothing but the grace period keeps the two apart.
#[cfg(feature = "fault-points")]
#[inline(always)]
fn linger() {
    for _ in 0..16_000 {
        // SAFETY: the helper takes nothing and touches nothing.
        core::hint::black_box(unsafe { aya_ebpf::helpers::generated::bpf_ktime_get_ns() });
    }
}

// SAFETY of every `get` below: nothing is ever written to the tables of a side that a program may still be reading, so
// an entry neither changes nor is reused under the reference; and it is copied out at once.

impl Tables for Side<V4> {
    type Ip = V4;
    type Backend = Backend4;

    #[inline(always)]
    fn frontend(&self, address: V4, port: Be16, protocol: u8) -> Option<Frontend> {
        let key = FrontendKey4 { address, port, protocol, zero: 0 };
        // SAFETY: see above.
        unsafe { FRONTENDS4.get(self.index)?.get(key) }.copied()
    }

    #[inline(always)]
    fn backend(&self, key: BackendKey) -> Option<Backend4> {
        #[cfg(feature = "fault-points")]
        linger();
        // SAFETY: see above.
        unsafe { BACKENDS4.get(self.index)?.get(key) }.copied()
    }

    #[inline(always)]
    fn is_member(&self, set: u32, backend: Backend4) -> bool {
        MEMBERS4.get(self.index).is_some_and(|it| it.get_ptr(MemberKey4 { set, backend }).is_some())
    }
}

impl Tables for Side<V6> {
    type Ip = V6;
    type Backend = Backend6;

    #[inline(always)]
    fn frontend(&self, address: V6, port: Be16, protocol: u8) -> Option<Frontend> {
        let key = FrontendKey6 { address, port, protocol, zero: 0 };
        // SAFETY: see above.
        unsafe { FRONTENDS6.get(self.index)?.get(key) }.copied()
    }

    #[inline(always)]
    fn backend(&self, key: BackendKey) -> Option<Backend6> {
        #[cfg(feature = "fault-points")]
        linger();
        // SAFETY: see above.
        unsafe { BACKENDS6.get(self.index)?.get(key) }.copied()
    }

    #[inline(always)]
    fn is_member(&self, set: u32, backend: Backend6) -> bool {
        MEMBERS6.get(self.index).is_some_and(|it| it.get_ptr(MemberKey6 { set, backend }).is_some())
    }
}
