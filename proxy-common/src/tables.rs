//! The tables of one generation: frontends, node ports, the backends of their sets, and the members of sets.
//!
//! Each table exists once per address family and side, behind a two-slot outer map: backends as an array, all others as
//! hash maps. A frontend names a *set*, whose backends lie side by side in the array, so that a random one is one load.
//! Where a socket returns to a backend (unconnected UDP), the members table says whether it is still in the set.
//! What is nobody's is mostly told by the side's [`Outline`], without a look-up.

#[cfg(feature = "user")]
use bytemuck::{Pod, Zeroable};

use crate::{
    counters::Cell,
    net::{Be16, V4, V6},
};

/// IP protocol number of TCP.
pub const TCP: u8 = 6;
/// IP protocol number of UDP.
pub const UDP: u8 = 17;

/// What a frontend is found by, over IPv4.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct FrontendKey4 {
    /// The destination address.
    pub address: V4,
    /// The destination port.
    pub port: Be16,
    /// The IP protocol number.
    pub protocol: u8,
    /// Always zero.
    pub zero: u8,
}

/// What a frontend is found by, over IPv6.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct FrontendKey6 {
    /// The destination address.
    pub address: V6,
    /// The destination port.
    pub port: Be16,
    /// The IP protocol number.
    pub protocol: u8,
    /// Always zero.
    pub zero: u8,
}

/// What stands behind a frontend.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Frontend {
    /// The set of its backends, as [`MemberKey4`] and [`MemberKey6`] name it.
    pub set: u32,
    /// How many backends the set has; with none, the connection is refused.
    pub count: u32,
    /// Of a node port: [`OWN_ADDRESSES_ONLY`], or 0.
    pub flags: u32,
    /// Seconds after its last connection for which a client keeps its backend; 0 for no affinity.
    pub affinity: u32,
    /// Which service port it is: the same in every generation, and after every restart.
    pub service: u64,
    /// The first of the service port's cells.
    pub cell: Cell,
    /// Where its backends are: at this position of the family's array, and at the `count - 1` after it.
    pub first: u32,
    /// Makes this layout another one, so that the tests of an upgrade cross a real difference.
    #[cfg(feature = "next-layout")]
    pub other_layout: u64,
}

/// The node port is left untouched at the addresses of other nodes, which decide for themselves (external policy Local).
pub const OWN_ADDRESSES_ONLY: u32 = 1;

/// What a node port is found by. It is in force at every address that is some node's ([`Place`]).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct NodePortKey {
    /// The port.
    pub port: Be16,
    /// The IP protocol number.
    pub protocol: u8,
    /// The IP version, 4 or 6.
    pub family: u8,
}

/// Whose an address is.
pub type Place = u32;
/// An address of this node.
pub const OWN: Place = 1;
/// An address of another node.
pub const OTHER: Place = 2;
/// The loopback address: this node's, in its own network namespace.
pub const LOOPBACK: Place = 3;

/// The least and the greatest node port of a side.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Span {
    /// The least; above the greatest if there is none.
    pub least: u16,
    /// The greatest.
    pub greatest: u16,
}

impl Span {
    /// No port at all.
    pub const NOTHING: Self = Self { least: 1, greatest: 0 };

    /// Whether a port lies in it.
    #[inline(always)]
    pub const fn contains(self, port: Be16) -> bool {
        self.least <= port.get() && port.get() <= self.greatest
    }
}

/// Where the frontends of a side may be: what lies outside is told apart by one load, without a look-up.
///
/// Most that a node connects to is nobody's Service, and lies in other networks than Services do.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Outline {
    /// Between which ports the node ports lie.
    pub span: Span,
    /// Always zero.
    pub zero: u32,
    /// The networks of IPv4 frontends.
    pub networks4: Networks,
    /// The networks of IPv6 frontends.
    pub networks6: Networks,
}

impl Outline {
    /// Of nothing.
    pub const EMPTY: Self =
        Self { span: Span::NOTHING, zero: 0, networks4: Networks::NONE, networks6: Networks::NONE };
}

/// Networks, a bit for each.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Networks([u64; 1 << (Network::BITS - 6)]);

impl Networks {
    /// None of them.
    pub const NONE: Self = Self([0; _]);

    /// Whether this one is there.
    #[inline(always)]
    pub const fn contain(&self, network: Network) -> bool {
        self.0[network as usize >> 6] & 1 << (network & 63) != 0
    }

    /// Adds one.
    pub const fn add(&mut self, network: Network) {
        self.0[network as usize >> 6] |= 1 << (network & 63);
    }
}

/// In which of 65,536 networks an address is.
pub type Network = u16;

/// The /16 that an IPv4 address is in.
#[inline(always)]
pub const fn network4(address: V4) -> Network {
    let [a, b, _, _] = address.raw().to_ne_bytes();
    Network::from_ne_bytes([a, b])
}

/// What the /64 that an IPv6 address is in folds to.
#[inline(always)]
pub const fn network6(address: V6) -> Network {
    let [a, b, _, _] = address.raw();
    let folded = a ^ b;
    (folded ^ folded >> 16) as Network
}

/// Where a backend is, over IPv4.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Backend4 {
    /// Its address.
    pub address: V4,
    /// Its port.
    pub port: Be16,
    /// Always zero.
    pub zero: u16,
}

/// Where a backend is, over IPv6.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Backend6 {
    /// Its address.
    pub address: V6,
    /// Its port.
    pub port: Be16,
    /// Always zero.
    pub zero: u16,
}

/// What is at a position of the array of backends, over IPv4; all zeroes where nothing is.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Slot4 {
    /// The backend.
    pub backend: Backend4,
    /// Where its connections are counted.
    pub cell: Cell,
}

/// What is at a position of the array of backends, over IPv6; all zeroes where nothing is.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Slot6 {
    /// The backend.
    pub backend: Backend6,
    /// Where its connections are counted.
    pub cell: Cell,
}

/// What a member of a set is found by, over IPv4.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct MemberKey4 {
    /// The set.
    pub set: u32,
    /// The backend that may be in it.
    pub backend: Backend4,
}

/// What a member of a set is found by, over IPv6.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct MemberKey6 {
    /// The set.
    pub set: u32,
    /// The backend that may be in it.
    pub backend: Backend6,
}

/// Says that the key is a member, and where its connections are counted.
pub type Member = Cell;

const _: () = assert!(size_of::<FrontendKey4>() == 8);
const _: () = assert!(size_of::<FrontendKey6>() == 20);
const _: () = assert!(size_of::<Frontend>() == if cfg!(feature = "next-layout") { 40 } else { 32 });
const _: () = assert!(size_of::<NodePortKey>() == 4);
const _: () = assert!(size_of::<Outline>() == 8 + 2 * 8192);
const _: () = assert!(size_of::<Backend4>() == 8);
const _: () = assert!(size_of::<Backend6>() == 20);
const _: () = assert!(size_of::<Slot4>() == 12);
const _: () = assert!(size_of::<Slot6>() == 24);
const _: () = assert!(size_of::<MemberKey4>() == 12);
const _: () = assert!(size_of::<MemberKey6>() == 24);
