//! Addresses and ports with network byte order in their types, so that it cannot be confused with the host's.

/// A 16-bit integer in network byte order: the port of a socket address.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct Be16(u16);

impl Be16 {
    /// From an integer in host byte order.
    #[inline(always)]
    pub const fn new(value: u16) -> Self {
        Self(value.to_be())
    }

    /// From an integer that is in network byte order already, as the kernel passes it.
    #[inline(always)]
    pub const fn from_raw(raw: u16) -> Self {
        Self(raw)
    }

    /// The integer in network byte order.
    #[inline(always)]
    pub const fn raw(self) -> u16 {
        self.0
    }

    /// The integer in host byte order.
    #[inline(always)]
    pub const fn get(self) -> u16 {
        u16::from_be(self.0)
    }
}

/// An IPv4 address as the kernel holds it: 32 bits in network byte order.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct V4(u32);

impl V4 {
    /// From an integer that is in network byte order already.
    #[inline(always)]
    pub const fn from_raw(raw: u32) -> Self {
        Self(raw)
    }

    /// The integer in network byte order.
    #[inline(always)]
    pub const fn raw(self) -> u32 {
        self.0
    }

    pub const LOOPBACK: Self = Self(u32::from_ne_bytes([127, 0, 0, 1]));

    #[inline(always)]
    pub const fn is_loopback(self) -> bool {
        self.0.to_ne_bytes()[0] == 127
    }

    /// Where a connect to this address arrives: 127.0.0.1 stands for every loopback address and for the unspecified one.
    #[inline(always)]
    pub const fn effective_destination(self) -> Self {
        if self.0 == 0 || self.is_loopback() { Self::LOOPBACK } else { self }
    }

    /// The address as v4-mapped, `::ffff:a.b.c.d` (RFC 4291, 2.5.5.2).
    #[inline(always)]
    pub const fn mapped(self) -> V6 {
        V6([0, 0, 0xffff_u32.to_be(), self.0])
    }

    /// The IPv4 address of a v4-mapped address.
    #[inline(always)]
    pub const fn from_mapped(address: V6) -> Option<Self> {
        let [a, b, c, d] = address.0;
        if a == 0 && b == 0 && c == 0xffff_u32.to_be() { Some(Self(d)) } else { None }
    }
}

/// An IPv6 address as the kernel holds it: four words of 32 bits, each in network byte order.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct V6([u32; 4]);

impl V6 {
    /// From words that are in network byte order already.
    #[inline(always)]
    pub const fn from_raw(raw: [u32; 4]) -> Self {
        Self(raw)
    }

    /// The words in network byte order.
    #[inline(always)]
    pub const fn raw(self) -> [u32; 4] {
        self.0
    }

    /// `::1`.
    pub const LOOPBACK: Self = Self([0, 0, 0, 1_u32.to_be()]);

    /// Whether it is `::1`, or a v4-mapped loopback address.
    #[inline(always)]
    pub const fn is_loopback(self) -> bool {
        let [a, b, c, d] = self.0;
        a == 0 && b == 0 && (c == 0xffff_u32.to_be() && V4(d).is_loopback() || c == 0 && d == 1_u32.to_be())
    }

    /// Where a connect to this address arrives: the loopback address stands for the unspecified one.
    #[inline(always)]
    pub const fn effective_destination(self) -> Self {
        let [a, b, c, d] = self.0;
        if a == 0 && b == 0 && c == 0 && d == 0 { Self::LOOPBACK } else { self }
    }

    #[inline(always)]
    pub const fn mapped(self) -> Self {
        self
    }

    #[inline(always)]
    pub const fn from_mapped(address: Self) -> Option<Self> {
        Some(address)
    }
}

/// A socket address, IPv4 as v4-mapped: a v6 socket that sends to `::ffff:a.b.c.d` runs the v4 hook and receives its reply
/// in the v6 one.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct SockAddr {
    pub ip: V6,
    pub port: Be16,
    pub zero: u16,
}

impl SockAddr {
    pub const UNSET: Self = Self { ip: V6::from_raw([0; 4]), port: Be16::new(0), zero: 0 };

    #[inline(always)]
    pub const fn new(ip: V6, port: Be16) -> Self {
        Self { ip, port, zero: 0 }
    }

    /// Whether it stands for "no address": nothing is ever redirected to port 0.
    #[inline(always)]
    pub const fn is_unset(&self) -> bool {
        self.port.raw() == 0
    }
}

const _: () = assert!(size_of::<SockAddr>() == 20);

#[cfg(feature = "user")]
mod user {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

    use super::{Be16, SockAddr, V4, V6};

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
            V4::from_mapped(address).map_or_else(|| Self::V6(address.into()), |v4| Self::V4(v4.into()))
        }
    }
    impl From<IpAddr> for V6 {
        /// A v4 address becomes a v4-mapped one.
        fn from(address: IpAddr) -> Self {
            match address {
                IpAddr::V4(ip) => V4::from(ip).mapped(),
                IpAddr::V6(ip) => ip.into(),
            }
        }
    }

    impl From<SockAddr> for SocketAddr {
        /// A v4-mapped address becomes a v4 one.
        fn from(address: SockAddr) -> Self {
            Self::new(address.ip.into(), address.port.get())
        }
    }

    impl From<SocketAddr> for SockAddr {
        /// A v4 address becomes a v4-mapped one.
        fn from(address: SocketAddr) -> Self {
            Self::new(address.ip().into(), Be16::new(address.port()))
        }
    }
}

#[cfg(all(test, feature = "user"))]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn loopback_and_the_unspecified_address_arrive_at_loopback() {
        for (address, is_loopback, arrives) in [
            ([127, 0, 0, 1], true, [127, 0, 0, 1]),
            ([127, 255, 0, 9], true, [127, 0, 0, 1]),
            ([0, 0, 0, 0], false, [127, 0, 0, 1]),
            ([10, 0, 0, 127], false, [10, 0, 0, 127]),
            ([128, 0, 0, 1], false, [128, 0, 0, 1]),
        ] {
            let v4 = V4::from(Ipv4Addr::from(address));
            assert_eq!(
                (v4.is_loopback(), Ipv4Addr::from(v4.effective_destination())),
                (is_loopback, arrives.into())
            );
        }
    }

    #[test]
    fn only_a_v4_mapped_address_is_a_v4_one() {
        for text in ["::ffff:10.0.0.1", "::ffff:0.0.0.0"] {
            let v6: Ipv6Addr = text.parse().unwrap();
            assert_eq!(IpAddr::from(V6::from(v6)), v6.to_canonical());
            assert_eq!(V4::from_mapped(v6.into()).map(V4::mapped), Some(v6.into()));
        }
        for text in
            ["::a00:1", "1::ffff:a00:1", "0:0:1::ffff:a00:1", "::1:ffff:a00:1", "::fffe:a00:1", "fd00::1"]
        {
            let v6: Ipv6Addr = text.parse().unwrap();
            assert_eq!(V4::from_mapped(v6.into()), None, "{text}");
            assert_eq!(IpAddr::from(V6::from(v6)), IpAddr::V6(v6), "{text}");
        }
    }
}
