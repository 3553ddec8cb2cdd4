//! Every map, and the one way to read a generation: [`Side`].

use core::marker::PhantomData;

use aya_ebpf::{
    Global,
    bindings::{BPF_F_INNER_MAP, BPF_F_NO_PREALLOC},
    btf_maps::{Array, ArrayOfMaps, HashMap, LruHashMap, SkStorage},
    macros::btf_map,
};
use proxy_common::{
    affinity::{Affinity, AffinityKey},
    counters::{CHUNKS, Cell, Row},
    decide::Tables,
    net::{Be16, V4, V6},
    peers::{COUNTS, Peer, PeerKey},
    scope,
    socket::{Address, Connected, Datagrams, Slot},
    tables::{
        Backend4, Backend6, Frontend, FrontendKey4, FrontendKey6, Member, MemberKey4, MemberKey6,
        NodePortKey, Outline, Place, Slot4, Slot6, network4, network6,
    },
};

/// The side word, 0 or 1: the side whose tables are in force; and how often it flipped, which only user space reads.
#[btf_map]
static ACTIVE: Array<u32, 2> = Array::new();

/// Where each side's frontends may be.
#[btf_map]
static OUTLINES: Array<Outline, 2> = Array::new();

// The tables, each behind an outer map with a slot per side.
// The size of the inner map here is only a template: user space puts in maps of the size it needs.

#[btf_map]
static FRONTENDS4: ArrayOfMaps<HashMap<FrontendKey4, Frontend, 1>, 2> = ArrayOfMaps::new();
#[btf_map]
static FRONTENDS6: ArrayOfMaps<HashMap<FrontendKey6, Frontend, 1>, 2> = ArrayOfMaps::new();
#[btf_map]
static BACKENDS4: ArrayOfMaps<Array<Slot4, 1, { BPF_F_INNER_MAP as usize }>, 2> = ArrayOfMaps::new();
#[btf_map]
static BACKENDS6: ArrayOfMaps<Array<Slot6, 1, { BPF_F_INNER_MAP as usize }>, 2> = ArrayOfMaps::new();
#[btf_map]
static NODE_PORTS: ArrayOfMaps<HashMap<NodePortKey, Frontend, 1>, 2> = ArrayOfMaps::new();
#[btf_map]
static PLACES: ArrayOfMaps<HashMap<V6, Place, 1>, 2> = ArrayOfMaps::new();
#[btf_map]
static MEMBERS4: ArrayOfMaps<HashMap<MemberKey4, Member, 1>, 2> = ArrayOfMaps::new();
#[btf_map]
static MEMBERS6: ArrayOfMaps<HashMap<MemberKey6, Member, 1>, 2> = ArrayOfMaps::new();

/// What is counted, chunk by chunk. A chunk is put in when its first cell is needed, and taken out when nobody counts
/// there any more.
#[btf_map]
pub(crate) static COUNTERS: ArrayOfMaps<Array<Row, 1>, { CHUNKS as usize }> = ArrayOfMaps::new();

/// Which backend a client was given; user space says for how many. Who was not heard of longest is forgotten first.
#[btf_map]
pub(crate) static CLIENTS: LruHashMap<AffinityKey, Affinity, 1> = LruHashMap::new();
/// How many clients ever came into [`CLIENTS`]: those that are not there any more were forgotten for want of room.
#[btf_map]
pub(crate) static CAME: Array<u64, 1> = Array::new();

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
/// What such sockets remember beyond that; user space says how many entries there may be. None takes memory before it is
/// there.
#[btf_map]
pub(crate) static PEERS: HashMap<PeerKey, Peer, 1, { BPF_F_NO_PREALLOC as usize }> = HashMap::new();
/// What is counted of [`PEERS`].
#[btf_map]
pub(crate) static PEER_COUNTS: Array<u64, { COUNTS as usize }> = Array::new();

/// The cgroups whose processes are left alone, by their ids.
#[btf_map]
pub(crate) static EXCLUDED: HashMap<u64, u32, { scope::MOST as usize }> = HashMap::new();

/// On which levels of the hierarchy these are, a bit for each.
#[unsafe(no_mangle)]
static EXCLUDED_LEVELS: Global<u32> = Global::new(0);

/// On which levels of the hierarchy there may be cgroups that are left alone.
#[inline(always)]
pub(crate) fn excluded_levels() -> u32 {
    EXCLUDED_LEVELS.load()
}

/// Whether only sockets of the node's own network namespace are served.
#[unsafe(no_mangle)]
static HOST_ONLY: Global<u32> = Global::new(0);

/// Whether sockets of other network namespaces are left alone.
#[inline(always)]
pub(crate) fn serves_host_only() -> bool {
    HOST_ONLY.load() != 0
}

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

/// One less than a chunk of [`COUNTERS`] has stripes.
#[unsafe(no_mangle)]
static STRIPE_MASK: Global<u32> = Global::new(0);

/// Which bits of a CPU's number say which stripe it counts in.
#[inline(always)]
pub(crate) fn stripe_mask() -> u32 {
    STRIPE_MASK.load()
}

/// Makes the choices of one load of the programs others than those of the next, and of each node.
#[unsafe(no_mangle)]
static SEED: Global<u64> = Global::new(0);

/// What choices are mixed with.
#[inline(always)]
pub(crate) fn seed() -> u64 {
    SEED.load()
}

/// The cookie of the node's own network namespace; 0 where the kernel tells it to nobody (before 5.14).
#[unsafe(no_mangle)]
static HOST_NETNS: Global<u64> = Global::new(0);

/// The cookie of the node's own network namespace, if known.
#[inline(always)]
pub(crate) fn host_netns() -> u64 {
    HOST_NETNS.load()
}

/// Whether a program on the node may not bind a node port.
#[unsafe(no_mangle)]
static PROTECT_NODE_PORTS: Global<u32> = Global::new(0);

/// Whether node ports are kept from being bound.
#[inline(always)]
pub(crate) fn protects_node_ports() -> bool {
    PROTECT_NODE_PORTS.load() != 0
}

/// Set at load where the kernel has `bpf_skc_to_mptcp_sock` (5.19).
#[unsafe(no_mangle)]
static MPTCP: Global<u32> = Global::new(0);

/// Whether a program may ask for the MPTCP socket behind a subflow.
#[inline(always)]
pub(crate) fn can_tell_mptcp() -> bool {
    MPTCP.load() != 0
}

/// Set at load where the kernel has `bpf_skc_to_tcp_sock` (5.10), and tells where the bit is.
#[unsafe(no_mangle)]
static TCP_SOCK: Global<u32> = Global::new(0);

/// Whether a program may read [`kern_sock_bit`] of a TCP socket.
#[inline(always)]
pub(crate) fn can_read_tcp_sock() -> bool {
    TCP_SOCK.load() != 0
}

/// Set at load where the kernel has `bpf_probe_read_kernel` for programs like these, and tells where the bit is.
#[unsafe(no_mangle)]
static ANY_SOCK: Global<u32> = Global::new(0);

/// Whether a program may read [`kern_sock_bit`] of any socket.
#[inline(always)]
pub(crate) fn can_read_any_sock() -> bool {
    ANY_SOCK.load() != 0
}

/// Where `sk_kern_sock` is in this kernel's `struct sock`: in which byte.
#[unsafe(no_mangle)]
static KERN_SOCK_BYTE: Global<u32> = Global::new(0);

/// The place of the byte of `struct sock` in which it says that the socket is the kernel's own.
#[inline(always)]
pub(crate) fn kern_sock_byte() -> usize {
    KERN_SOCK_BYTE.load() as usize
}

/// And in which bit of it, as a mask.
#[unsafe(no_mangle)]
static KERN_SOCK_BIT: Global<u32> = Global::new(0);

/// The bit of that byte, alone.
#[inline(always)]
pub(crate) fn kern_sock_bit() -> u32 {
    KERN_SOCK_BIT.load()
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

    /// Where this side's frontends may be.
    #[inline(always)]
    fn outline(&self) -> Option<&Outline> {
        OUTLINES.get(self.index)
    }

    /// Whether a port lies in the span of this side's node ports.
    #[inline(always)]
    fn spans(&self, port: Be16) -> bool {
        self.outline().is_some_and(|it| it.span.contains(port))
    }

    /// What stands behind a node port of one IP version.
    #[inline(always)]
    fn node_port_of(&self, port: Be16, protocol: u8, family: u8) -> Option<Frontend> {
        let key = NodePortKey { port, protocol, family };
        // SAFETY: nothing is written to the tables of a side that a program may still be reading.
        unsafe { NODE_PORTS.get(self.index)?.get(key) }.copied()
    }

    /// Whose an address is.
    #[inline(always)]
    fn place_of(&self, address: V6) -> Option<Place> {
        // SAFETY: as above.
        unsafe { PLACES.get(self.index)?.get(address) }.copied()
    }

    /// The same side's tables of another IP version.
    #[inline(always)]
    pub(crate) fn of_family<Other>(&self) -> Side<Other> {
        Side { index: self.index, family: PhantomData }
    }
}

/// A megabyte, and another one to copy it to.
#[cfg(feature = "fault-points")]
#[btf_map]
static LINGER: Array<[u64; 1 << 17], 2> = Array::new();

/// Spends hundreds of microseconds between two steps of a decision: longer than user space takes from a flip to its next
/// write, so that nothing but the grace period keeps the two apart. By copying, as the verifier follows each round of a
/// loop anew, wherever a decision comes by.
#[cfg(feature = "fault-points")]
#[inline(always)]
fn linger() {
    let Some(from) = LINGER.get_ptr(0) else { return };
    for _ in 0..8 {
        // SAFETY: a slot of an array is never freed, and nobody writes to this one.
        let _ = LINGER.set(1, unsafe { &*from }, 0);
    }
}

// SAFETY of every `get` below: nothing is ever written to the tables of a side that a program may still be reading, so
// an entry neither changes nor is reused under the reference; and it is copied out at once.
// The same holds for what `outline` refers to.

impl Tables for Side<V4> {
    type Ip = V4;
    type Backend = Backend4;

    #[inline(always)]
    fn may_be_frontend(&self, address: V4) -> bool {
        self.outline().is_some_and(|it| it.networks4.contain(network4(address)))
    }

    #[inline(always)]
    fn frontend(&self, address: V4, port: Be16, protocol: u8) -> Option<Frontend> {
        let key = FrontendKey4 { address, port, protocol, zero: 0 };
        // SAFETY: see above.
        unsafe { FRONTENDS4.get(self.index)?.get(key) }.copied()
    }

    #[inline(always)]
    fn may_be_node_port(&self, port: Be16) -> bool {
        self.spans(port)
    }

    #[inline(always)]
    fn node_port(&self, port: Be16, protocol: u8) -> Option<Frontend> {
        self.node_port_of(port, protocol, 4)
    }

    #[inline(always)]
    fn place(&self, address: V4) -> Option<Place> {
        self.place_of(address.reached().mapped())
    }

    #[inline(always)]
    fn backend(&self, position: u32) -> Option<(Backend4, Cell)> {
        #[cfg(feature = "fault-points")]
        linger();
        let slot = *BACKENDS4.get(self.index)?.get(position)?;
        Some((slot.backend, slot.cell))
    }

    #[inline(always)]
    fn member(&self, set: u32, backend: Backend4) -> Option<Cell> {
        // SAFETY: see above.
        unsafe { MEMBERS4.get(self.index)?.get(MemberKey4 { set, backend }) }.copied()
    }

    const FAMILY: u32 = 4;

    #[inline(always)]
    fn backend_at(&self, address: Address) -> Backend4 {
        Backend4 { address: address.ip.to_v4().unwrap_or_default(), port: address.port, zero: 0 }
    }

    #[inline(always)]
    fn address_of(&self, backend: Backend4) -> Address {
        Address::new(backend.address.mapped(), backend.port)
    }
}

impl Tables for Side<V6> {
    type Ip = V6;
    type Backend = Backend6;

    #[inline(always)]
    fn may_be_frontend(&self, address: V6) -> bool {
        self.outline().is_some_and(|it| it.networks6.contain(network6(address)))
    }

    #[inline(always)]
    fn frontend(&self, address: V6, port: Be16, protocol: u8) -> Option<Frontend> {
        let key = FrontendKey6 { address, port, protocol, zero: 0 };
        // SAFETY: see above.
        unsafe { FRONTENDS6.get(self.index)?.get(key) }.copied()
    }

    #[inline(always)]
    fn may_be_node_port(&self, port: Be16) -> bool {
        self.spans(port)
    }

    #[inline(always)]
    fn node_port(&self, port: Be16, protocol: u8) -> Option<Frontend> {
        self.node_port_of(port, protocol, 6)
    }

    #[inline(always)]
    fn place(&self, address: V6) -> Option<Place> {
        self.place_of(address.reached())
    }

    #[inline(always)]
    fn backend(&self, position: u32) -> Option<(Backend6, Cell)> {
        #[cfg(feature = "fault-points")]
        linger();
        let slot = *BACKENDS6.get(self.index)?.get(position)?;
        Some((slot.backend, slot.cell))
    }

    #[inline(always)]
    fn member(&self, set: u32, backend: Backend6) -> Option<Cell> {
        // SAFETY: see above.
        unsafe { MEMBERS6.get(self.index)?.get(MemberKey6 { set, backend }) }.copied()
    }

    const FAMILY: u32 = 6;

    #[inline(always)]
    fn backend_at(&self, address: Address) -> Backend6 {
        Backend6 { address: address.ip, port: address.port, zero: 0 }
    }

    #[inline(always)]
    fn address_of(&self, backend: Backend6) -> Address {
        Address::new(backend.address, backend.port)
    }
}
