//! The tables of one generation: frontends, node ports, the backends of their sets, and the members of sets.
//!
//! Each table exists once per address family and side, as a hash map behind a two-slot outer map.
//! A frontend names a *set*; the backends of a set lie in slots `0..count`, so that a random slot is one look-up.
//! Where a socket returns to a backend (unconnected UDP), the members table says whether it is still in the set.

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
    /// The set of its backends.
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
    /// Always zero.
    pub zero: u32,
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

/// The least and the greatest node port of a side, in one word, so that what is neither is told apart without a look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The least; above the greatest if there is none.
    pub least: u16,
    /// The greatest.
    pub greatest: u16,
}

impl Span {
    /// No port at all.
    pub const NOTHING: Self = Self { least: 1, greatest: 0 };

    /// From the word that stands for it; the word 0 is a span of nothing but port 0.
    #[inline(always)]
    pub const fn from_word(word: u32) -> Self {
        Self { least: (word >> 16) as u16, greatest: word as u16 }
    }

    /// The word that stands for it.
    pub const fn word(self) -> u32 {
        (self.least as u32) << 16 | self.greatest as u32
    }

    /// Whether a port lies in it.
    #[inline(always)]
    pub const fn contains(self, port: Be16) -> bool {
        self.least <= port.get() && port.get() <= self.greatest
    }
}

/// What a backend is found by: a set and a slot in `0..count`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct BackendKey {
    /// The set.
    pub set: u32,
    /// The slot in it.
    pub slot: u32,
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

/// What is in a slot of a set, over IPv4.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Slot4 {
    /// The backend.
    pub backend: Backend4,
    /// Where its connections are counted.
    pub cell: Cell,
}

/// What is in a slot of a set, over IPv6.
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
const _: () = assert!(size_of::<BackendKey>() == 8);
const _: () = assert!(size_of::<Backend4>() == 8);
const _: () = assert!(size_of::<Backend6>() == 20);
const _: () = assert!(size_of::<Slot4>() == 12);
const _: () = assert!(size_of::<Slot6>() == 24);
const _: () = assert!(size_of::<MemberKey4>() == 12);
const _: () = assert!(size_of::<MemberKey6>() == 24);
