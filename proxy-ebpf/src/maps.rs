//! Every map of the programs.

use aya_ebpf::{
    bindings::{BPF_F_INNER_MAP, BPF_F_NO_PREALLOC},
    btf_maps::{Array, ArrayOfMaps, HashMap, LruHashMap, PerCpuArray},
    macros::btf_map,
};
use proxy_common::{
    affinity::{AffinityEntry, AffinityKey},
    counters::{CounterStripe, MAX_CHUNKS},
    exclusion::MAX_EXCLUDED,
    forward::{Forward, ForwardNode, RowPair},
    health::{FailureKey, FailureRecord, MAX_RECORDS, WORDS},
    net::{V4, V6},
    overflow::{MAX_NETNS, NetnsUsage, OverflowEntry, OverflowKey, STAT_COUNT},
    senders::{MAX_SENDERS, SenderKey},
    sock_nat::{NatSlot, SLOT_SHARE_CELLS},
    tables::{BackendSetMember, Family, Frontend, FrontendKey6, NodeAddrScope, NodePortKey, Prefilter},
};

/// A table: an outer map with an inner map for each side.
/// The size of the inner map here is only a template: user space inserts maps of the size it needs.
pub(crate) type Table<K, V> = ArrayOfMaps<HashMap<K, V, 1>, 2>;
pub(crate) type Frontends<F> = Table<<F as Family>::FrontendKey, Frontend>;
pub(crate) type Backends<F> =
    ArrayOfMaps<Array<<F as Family>::BackendEntry, 1, { BPF_F_INNER_MAP as usize }>, 2>;
pub(crate) type Members<F> = Table<<F as Family>::BackendSetMemberKey, BackendSetMember>;

/// The active-side word, 0 or 1; and the number of flips so far, which only user space reads.
#[btf_map]
pub(crate) static ACTIVE: Array<u32, 2> = Array::new();

/// The prefilter of each side.
#[btf_map]
pub(crate) static PREFILTER: Array<Prefilter, 2> = Array::new();

#[btf_map]
pub(crate) static FRONTENDS4: Frontends<V4> = ArrayOfMaps::new();
#[btf_map]
pub(crate) static FRONTENDS6: Frontends<V6> = ArrayOfMaps::new();
#[btf_map]
pub(crate) static BACKENDS4: Backends<V4> = ArrayOfMaps::new();
#[btf_map]
pub(crate) static BACKENDS6: Backends<V6> = ArrayOfMaps::new();
#[btf_map]
pub(crate) static NODE_PORTS: Table<NodePortKey, Frontend> = ArrayOfMaps::new();
#[btf_map]
pub(crate) static NODE_ADDRS: Table<V6, NodeAddrScope> = ArrayOfMaps::new();
#[btf_map]
pub(crate) static MEMBERS4: Members<V4> = ArrayOfMaps::new();
#[btf_map]
pub(crate) static MEMBERS6: Members<V6> = ArrayOfMaps::new();

/// The frontends whose packets from outside are forwarded.
#[btf_map]
pub(crate) static FORWARDS: Table<FrontendKey6, Forward> = ArrayOfMaps::new();
/// The rows of these frontends, in pairs.
#[btf_map]
pub(crate) static FORWARD_ROWS: ArrayOfMaps<Array<RowPair, 1, { BPF_F_INNER_MAP as usize }>, 2> =
    ArrayOfMaps::new();
/// Where nodes receive wrapped packets, by number.
#[btf_map]
pub(crate) static FORWARD_NODES: ArrayOfMaps<Array<ForwardNode, 1, { BPF_F_INNER_MAP as usize }>, 2> =
    ArrayOfMaps::new();
/// The numbers of nodes, by the same addresses.
#[btf_map]
pub(crate) static FORWARD_NUMBERS: Table<V6, u32> = ArrayOfMaps::new();

/// The chunks of counters. A chunk is inserted when its first counter is allocated, and removed when none of its counters
/// is in use any more.
#[btf_map]
pub(crate) static COUNTERS: ArrayOfMaps<Array<CounterStripe, 1>, { MAX_CHUNKS as usize }> =
    ArrayOfMaps::new();

/// The backend that each client was given; user space sets the capacity. The client that was inactive longest is evicted
/// first.
#[btf_map]
pub(crate) static AFFINITY: LruHashMap<AffinityKey, AffinityEntry, 1> = LruHashMap::new();
/// How many clients were ever inserted into [`AFFINITY`]: those that are gone were evicted for want of room.
#[btf_map]
pub(crate) static AFFINITY_INSERTS: Array<u64, 1> = Array::new();

/// The translations of sockets, by cookie; user space sets the number of slots, a power of two.
#[btf_map]
pub(crate) static SLOTS: Array<NatSlot, 1> = Array::new();
/// How many slots the network namespaces of each cell use.
#[btf_map]
pub(crate) static SLOT_SHARES: Array<u64, { SLOT_SHARE_CELLS as usize }> = Array::new();
/// The translations that do not fit into [`SLOTS`]; user space sets the capacity. Entries are allocated when they are
/// inserted.
#[btf_map]
pub(crate) static OVERFLOW: HashMap<OverflowKey, OverflowEntry, 1, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();
/// Counts of [`OVERFLOW`].
#[btf_map]
pub(crate) static OVERFLOW_STATS: Array<u64, { STAT_COUNT as usize }> = Array::new();
/// What each network namespace uses of [`OVERFLOW`], by its cookie. User space removes those that use nothing.
#[btf_map]
pub(crate) static NETNS_USAGE: HashMap<
    u64,
    NetnsUsage,
    { MAX_NETNS as usize },
    { BPF_F_NO_PREALLOC as usize },
> = HashMap::new();
/// Entries of [`OVERFLOW`] that user space has deleted, by network namespace.
#[btf_map]
pub(crate) static NETNS_COLLECTED: HashMap<u64, u64, { MAX_NETNS as usize }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

/// When each sender has last sent to a port, in nanoseconds of the monotonic clock.
#[btf_map]
pub(crate) static SENDERS: LruHashMap<SenderKey, u64, { MAX_SENDERS as usize }> = LruHashMap::new();
/// Not zero while the packet path translates what is left to it.
#[btf_map]
pub(crate) static PACKET_PATH: Array<u32, 1> = Array::new();

/// Which endpoints fail for which clients.
#[btf_map]
pub(crate) static FAILURES: LruHashMap<FailureKey, FailureRecord, { MAX_RECORDS as usize }> =
    LruHashMap::new();
/// What is kept beside the records: [`HAS_RECORDS`](proxy_common::health::HAS_RECORDS) and its neighbors.
#[btf_map]
pub(crate) static HEALTH: Array<u64, { WORDS as usize }> = Array::new();
/// The cookie of the socket that this CPU is connecting, if its connection is watched.
#[btf_map]
pub(crate) static CONNECTING: PerCpuArray<u64, 1> = PerCpuArray::new();

/// The excluded cgroups, by id.
#[btf_map]
pub(crate) static EXCLUDED: HashMap<u64, u32, { MAX_EXCLUDED as usize }> = HashMap::new();

/// A megabyte, and another one to copy it to.
#[cfg(feature = "fault-points")]
#[btf_map]
pub(crate) static DELAY: Array<[u64; 1 << 17], 2> = Array::new();
