//! The tables of one generation: frontends, node ports, node addresses, backends, and the members of backend sets.
//!
//! Each table exists once per side, most of them also per address family, behind a two-slot outer map: backends as an array,
//! all others as hash maps. A frontend names a *set* of backends, which are adjacent in the array, so that a random one is
//! one load. Where a socket returns to a backend (unconnected UDP, session affinity), the members table says whether it is
//! still in the set.
//! The side's [`Prefilter`] recognizes most untranslated traffic without a look-up.

use crate::{
    counters::CounterIndex,
    net::{Be16, SockAddr, V4, V6},
    probe,
};

pub const TCP: u8 = 6;
pub const UDP: u8 = 17;

/// The value of a frontend or a node port.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct Frontend {
    /// The id of its backend set, as in [`BackendSetMemberKey4`] and [`BackendSetMemberKey6`].
    pub set: u32,
    /// How many backends the set has; with none, connections are refused.
    pub backend_count: u32,
    /// Where it is served, and how its backends are chosen.
    pub options: FrontendOptions,
    /// When its backends are ejected.
    pub health: HealthPolicy,
    /// For how many seconds after its last connection a client keeps its backend; 0 for no session affinity.
    pub affinity_timeout: u32,
    /// Identifies the service port: the same in every generation, and after every restart.
    pub service_port: u64,
    /// The first counter of the service port.
    pub counter: CounterIndex,
    /// The position of its first backend in the family's array; `backend_count - 1` more follow.
    pub backend_offset: u32,
    /// Makes this layout differ, so that the tests of an upgrade cross a real difference.
    #[cfg(feature = "next-layout")]
    pub other_layout: u64,
}

/// When the backends of a Service are ejected.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct HealthPolicy {
    /// How many connections in a row have to fail, at most [`MAX_FAILURES`]; 0 if none is ever ejected.
    pub failures: u8,
    /// How many percent of the backends are avoided at most. Never all of them.
    pub max_ejected: u8,
}

pub const MAX_FAILURES: u8 = 50;

/// Where a frontend is served, and how its backends are chosen.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct FrontendOptions(u16);

/// The node port is not translated at the addresses of other nodes, which decide for themselves (external policy Local).
const LOCAL_ADDRESSES_ONLY: u16 = 1;
const LEAST_CONNECTIONS: u16 = 1 << 1;
/// The seconds of the slow start are the bits from here on.
const SLOW_START: u32 = 2;
/// The longest slow start in seconds.
pub const MAX_SLOW_START: u16 = (1 << 12) - 1;
const TO_PACKETS: u16 = 1 << 14;
const EXTERNAL: u16 = 1 << 15;

impl FrontendOptions {
    /// `local_addresses_only`: not translated at the addresses of other nodes. `least_connections`: the one of two backends
    /// with fewer connections is chosen, instead of one at random. `slow_start`: how long the share of a new backend grows, in
    /// seconds, at most [`MAX_SLOW_START`]; 0 if a new backend has its full share at once.
    pub const fn new(local_addresses_only: bool, least_connections: bool, slow_start: u16) -> Self {
        let slow_start = if slow_start > MAX_SLOW_START { MAX_SLOW_START } else { slow_start };
        let least_connections = if least_connections { LEAST_CONNECTIONS } else { 0 };
        Self(local_addresses_only as u16 | least_connections | slow_start << SLOW_START)
    }

    /// These options of a frontend at an address that is no cluster IP: clients may have it, too.
    #[must_use]
    pub const fn external(self) -> Self {
        Self(self.0 | EXTERNAL)
    }

    /// These options of a frontend that is left to the packet path.
    #[must_use]
    pub const fn to_packets(self) -> Self {
        Self(self.0 | TO_PACKETS)
    }

    /// Whether other nodes decide for their own addresses.
    #[inline(always)]
    pub const fn local_addresses_only(self) -> bool {
        self.0 & LOCAL_ADDRESSES_ONLY != 0
    }

    #[inline(always)]
    pub const fn least_connections(self) -> bool {
        self.0 & LEAST_CONNECTIONS != 0
    }

    /// In seconds.
    #[inline(always)]
    pub const fn slow_start(self) -> u32 {
        (self.0 >> SLOW_START & MAX_SLOW_START) as u32
    }

    /// Whether backends are chosen by more than chance.
    #[inline(always)]
    pub const fn is_balanced(self) -> bool {
        self.0 & (LEAST_CONNECTIONS | MAX_SLOW_START << SLOW_START) != 0
    }

    #[inline(always)]
    pub const fn is_external(self) -> bool {
        self.0 & EXTERNAL != 0
    }

    /// Whether the packet path translates, where there is one.
    #[inline(always)]
    pub const fn is_to_packets(self) -> bool {
        self.0 & TO_PACKETS != 0
    }

    #[inline(always)]
    pub const fn bits(self) -> u16 {
        self.0
    }

    #[inline(always)]
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }
}

/// The key of a node port, which is served at every address that belongs to a node ([`NodeAddrScope`]).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct NodePortKey {
    pub port: Be16,
    pub protocol: u8,
    pub ip_version: u8,
}

/// Which node an address belongs to.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct NodeAddrScope(pub u32);

impl NodeAddrScope {
    /// This node.
    pub const LOCAL: Self = Self(1);
    /// Another node.
    pub const REMOTE: Self = Self(2);
    /// The loopback address: this node, in the node's own network namespace.
    pub const LOOPBACK: Self = Self(3);
    /// This node, and no address of its Node object: that of a bridge or a tunnel, which others may have no way to.
    pub const INTERFACE: Self = Self(4);

    /// Whether it is an address of this node that other hosts may reach.
    #[inline(always)]
    pub const fn is_local(self) -> bool {
        matches!(self, Self::LOCAL | Self::INTERFACE)
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct PortRange {
    /// The lowest port; above the highest if the range is empty.
    pub min: u16,
    pub max: u16,
}

impl PortRange {
    pub const EMPTY: Self = Self { min: 1, max: 0 };

    #[inline(always)]
    pub const fn contains(self, port: Be16) -> bool {
        self.min <= port.get() && port.get() <= self.max
    }
}

/// Where the frontends of a side may be: one load rules out every destination elsewhere, without a look-up.
///
/// Most destinations that a node connects to are no Service, and lie in other networks than Services do.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct Prefilter {
    /// From the lowest node port to the highest.
    pub node_ports: PortRange,
    /// Always zero.
    pub zero: u32,
    pub networks4: NetworkBitmap,
    pub networks6: NetworkBitmap,
}

impl Prefilter {
    /// That of a side without frontends.
    pub const EMPTY: Self = Self {
        node_ports: PortRange::EMPTY,
        zero: 0,
        networks4: NetworkBitmap::EMPTY,
        networks6: NetworkBitmap::EMPTY,
    };
}

/// A set of networks, one bit each.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct NetworkBitmap([u64; 1 << (Network::BITS - 6)]);

impl NetworkBitmap {
    pub const EMPTY: Self = Self([0; _]);

    #[inline(always)]
    pub const fn contains(&self, network: Network) -> bool {
        self.0[network as usize >> 6] & 1 << (network & 63) != 0
    }

    pub const fn insert(&mut self, network: Network) {
        self.0[network as usize >> 6] |= 1 << (network & 63);
    }
}

/// One of 65,536 networks that an address may be in.
pub type Network = u16;

/// The /16 of an IPv4 address.
#[inline(always)]
pub const fn network4(address: V4) -> Network {
    let [a, b, _, _] = address.raw().to_ne_bytes();
    Network::from_ne_bytes([a, b])
}

/// The /64 of an IPv6 address, folded to 16 bits.
#[inline(always)]
pub const fn network6(address: V6) -> Network {
    let [a, b, _, _] = address.raw();
    let folded = a ^ b;
    (folded ^ folded >> 16) as Network
}

/// The value of a member of a backend set: the counter of the backend's connections.
pub type BackendSetMember = CounterIndex;

/// An address family, named by the type of its IP addresses: its table entries and how they are made.
pub trait Family: Copy + Default + PartialEq {
    /// The IP version, 4 or 6.
    const VERSION: u8;
    const LOOPBACK: Self;
    const PROBE: Self;
    type FrontendKey: 'static;
    /// A backend; the default stands for none.
    type Backend: Copy + Default + PartialEq;
    /// An entry of the array of backends.
    type BackendEntry: Copy + 'static;
    type BackendSetMemberKey: 'static;

    /// Whether it is a loopback address, or an IPv4-mapped one.
    fn is_loopback(self) -> bool;
    fn frontend_key(self, port: Be16, protocol: u8) -> Self::FrontendKey;
    fn frontend_of(key: Self::FrontendKey) -> (SockAddr, u8);
    fn backend_entry(backend: Self::Backend, counter: CounterIndex) -> Self::BackendEntry;
    fn backend_of(entry: Self::BackendEntry) -> (Self::Backend, CounterIndex);
    /// The backend at a socket address; at the unspecified address if that is of the other family.
    fn backend_at(address: SockAddr) -> Self::Backend;
    fn sock_addr(backend: Self::Backend) -> SockAddr;
    fn member_key(set: u32, backend: Self::Backend) -> Self::BackendSetMemberKey;
    fn member_of(key: Self::BackendSetMemberKey) -> (u32, Self::Backend);
    /// Whether a frontend may have this address.
    fn may_be_frontend(self, prefilter: &Prefilter) -> bool;
    /// The key of a node address: where a connect to this address arrives, IPv4 as v4-mapped.
    fn node_addr_key(self) -> V6;
    /// The address, IPv4 as v4-mapped.
    fn mapped(self) -> V6;
    /// The address of this family that a v6 one stands for.
    fn from_mapped(address: V6) -> Option<Self>;
}

/// The table entries of one address family.
macro_rules! family {
    (
        $ip:ident, $version:literal, $probe:ident, $networks:ident, $network:ident,
        $frontend_key:ident, $backend:ident, $backend_entry:ident, $member_key:ident
    ) => {
        #[doc = concat!("The key of a frontend over IPv", $version, ".")]
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
        pub struct $frontend_key {
            pub address: $ip,
            pub port: Be16,
            pub protocol: u8,
            pub zero: u8,
        }

        #[doc = concat!("The address of a backend over IPv", $version, ".")]
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
        pub struct $backend {
            pub address: $ip,
            pub port: Be16,
            pub zero: u16,
        }

        #[doc = concat!("An entry of the array of backends over IPv", $version, "; all zeroes if unused.")]
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
        pub struct $backend_entry {
            pub backend: $backend,
            pub counter: CounterIndex,
        }

        #[doc = concat!("The key of a member of a backend set over IPv", $version, ".")]
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
        pub struct $member_key {
            pub set: u32,
            pub backend: $backend,
        }

        impl Family for $ip {
            const VERSION: u8 = $version;
            const LOOPBACK: Self = Self::LOOPBACK;
            const PROBE: Self = probe::$probe;
            type FrontendKey = $frontend_key;
            type Backend = $backend;
            type BackendEntry = $backend_entry;
            type BackendSetMemberKey = $member_key;

            #[inline(always)]
            fn is_loopback(self) -> bool {
                self.is_loopback()
            }

            #[inline(always)]
            fn frontend_key(self, port: Be16, protocol: u8) -> $frontend_key {
                $frontend_key { address: self, port, protocol, zero: 0 }
            }

            fn frontend_of(key: $frontend_key) -> (SockAddr, u8) {
                (SockAddr::new(key.address.mapped(), key.port), key.protocol)
            }

            fn backend_entry(backend: $backend, counter: CounterIndex) -> $backend_entry {
                $backend_entry { backend, counter }
            }

            #[inline(always)]
            fn backend_of(entry: $backend_entry) -> ($backend, CounterIndex) {
                (entry.backend, entry.counter)
            }

            #[inline(always)]
            fn backend_at(SockAddr { ip, port, .. }: SockAddr) -> $backend {
                $backend { address: Self::from_mapped(ip).unwrap_or_default(), port, zero: 0 }
            }

            #[inline(always)]
            fn sock_addr(backend: $backend) -> SockAddr {
                SockAddr::new(backend.address.mapped(), backend.port)
            }

            #[inline(always)]
            fn member_key(set: u32, backend: $backend) -> $member_key {
                $member_key { set, backend }
            }

            fn member_of(key: $member_key) -> (u32, $backend) {
                (key.set, key.backend)
            }

            #[inline(always)]
            fn may_be_frontend(self, prefilter: &Prefilter) -> bool {
                prefilter.$networks.contains($network(self))
            }

            #[inline(always)]
            fn node_addr_key(self) -> V6 {
                self.effective_destination().mapped()
            }

            #[inline(always)]
            fn mapped(self) -> V6 {
                self.mapped()
            }

            #[inline(always)]
            fn from_mapped(address: V6) -> Option<Self> {
                Self::from_mapped(address)
            }
        }
    };
}

family!(V4, 4, ADDRESS4, networks4, network4, FrontendKey4, Backend4, BackendEntry4, BackendSetMemberKey4);
family!(V6, 6, ADDRESS6, networks6, network6, FrontendKey6, Backend6, BackendEntry6, BackendSetMemberKey6);

const _: () = assert!(size_of::<HealthPolicy>() == 2);
const _: () = assert!(size_of::<FrontendKey4>() == 8);
const _: () = assert!(size_of::<FrontendKey6>() == 20);
const _: () = assert!(size_of::<Frontend>() == if cfg!(feature = "next-layout") { 40 } else { 32 });
const _: () = assert!(size_of::<NodePortKey>() == 4);
const _: () = assert!(size_of::<NodeAddrScope>() == 4);
const _: () = assert!(size_of::<Prefilter>() == 8 + 2 * 8192);
const _: () = assert!(size_of::<Backend4>() == 8);
const _: () = assert!(size_of::<Backend6>() == 20);
const _: () = assert!(size_of::<BackendEntry4>() == 12);
const _: () = assert!(size_of::<BackendEntry6>() == 24);
const _: () = assert!(size_of::<BackendSetMemberKey4>() == 12);
const _: () = assert!(size_of::<BackendSetMemberKey6>() == 24);
