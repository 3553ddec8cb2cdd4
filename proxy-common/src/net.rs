//! Network byte order as types, so that it cannot be mixed up with the host's.

#[cfg(feature = "user")]
use bytemuck::{Pod, Zeroable};

/// A 16-bit integer in network byte order: the port of a socket address.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Be16(u16);

impl Be16 {
    /// From the host's order.
    #[inline(always)]
    pub const fn new(value: u16) -> Self {
        Self(value.to_be())
    }

    /// From an integer whose bytes already stand in network order, as the kernel hands it over.
    #[inline(always)]
    pub const fn from_raw(raw: u16) -> Self {
        Self(raw)
    }

    /// The integer whose bytes stand in network order.
    #[inline(always)]
    pub const fn raw(self) -> u16 {
        self.0
    }

    /// In the host's order.
    #[inline(always)]
    pub const fn get(self) -> u16 {
        u16::from_be(self.0)
    }
}

/// An IPv4 address as the kernel holds it: 32 bits in network byte order.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct V4(u32);

impl V4 {
    /// From an integer whose bytes already stand in network order.
    #[inline(always)]
    pub const fn from_raw(raw: u32) -> Self {
        Self(raw)
    }

    /// The integer whose bytes stand in network order.
    #[inline(always)]
    pub const fn raw(self) -> u32 {
        self.0
    }

    /// 127.0.0.1.
    pub const LOOPBACK: Self = Self(u32::from_ne_bytes([127, 0, 0, 1]));

    /// Whether it is a host's own, wherever that is.
    #[inline(always)]
    pub const fn is_loopback(self) -> bool {
        self.0.to_ne_bytes()[0] == 127
    }

    /// Where a connect to this address ends: every loopback address is 127.0.0.1 here, and so is "any address".
    #[inline(always)]
    pub const fn reached(self) -> Self {
        if self.0 == 0 || self.is_loopback() { Self::LOOPBACK } else { self }
    }

    /// The same address v4-mapped, `::ffff:a.b.c.d` (RFC 4291, 2.5.5.2).
    #[inline(always)]
    pub const fn mapped(self) -> V6 {
        V6([0, 0, 0xffff_u32.to_be(), self.0])
    }
}

/// An IPv6 address as the kernel holds it: four words of 32 bits, each in network byte order.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct V6([u32; 4]);

impl V6 {
    /// From words whose bytes already stand in network order.
    #[inline(always)]
    pub const fn from_raw(raw: [u32; 4]) -> Self {
        Self(raw)
    }

    /// The words whose bytes stand in network order.
    #[inline(always)]
    pub const fn raw(self) -> [u32; 4] {
        self.0
    }

    /// `::1`.
    pub const LOOPBACK: Self = Self([0, 0, 0, 1_u32.to_be()]);

    /// Whether it is a host's own, wherever that is; v4-mapped ones count as what is inside.
    #[inline(always)]
    pub const fn is_loopback(self) -> bool {
        let [a, b, c, d] = self.0;
        a == 0 && b == 0 && (c == 0xffff_u32.to_be() && V4(d).is_loopback() || c == 0 && d == 1_u32.to_be())
    }

    /// Where a connect to this address ends: "any address" is the loopback address.
    #[inline(always)]
    pub const fn reached(self) -> Self {
        let [a, b, c, d] = self.0;
        if a == 0 && b == 0 && c == 0 && d == 0 { Self::LOOPBACK } else { self }
    }

    /// The IPv4 address inside, if this is a v4-mapped one.
    #[inline(always)]
    pub const fn to_v4(self) -> Option<V4> {
        let [a, b, c, d] = self.0;
        if a == 0 && b == 0 && c == 0xffff_u32.to_be() { Some(V4(d)) } else { None }
    }
}

#[cfg(feature = "user")]
mod user {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use super::{V4, V6};

    impl From<Ipv4Addr> for V4 {
        fn from(address: Ipv4Addr) -> Self {
            Self(u32::from_ne_bytes(address.octets()))
        }
    }

    impl From<V4> for Ipv4Addr {
        fn from(address: V4) -> Self {
            Self::from(address.0.to_ne_bytes())
        }
    }

    impl From<Ipv6Addr> for V6 {
        fn from(address: Ipv6Addr) -> Self {
            Self(bytemuck::cast(address.octets()))
        }
    }

    impl From<V6> for Ipv6Addr {
        fn from(address: V6) -> Self {
            Self::from(bytemuck::cast::<_, [u8; 16]>(address.0))
        }
    }

    impl From<V6> for IpAddr {
        /// A v4-mapped address becomes a v4 one.
        fn from(address: V6) -> Self {
            address.to_v4().map_or_else(|| Self::V6(address.into()), |v4| Self::V4(v4.into()))
        }
    }
}
