//! ICMP messages about packets that are forwarded: those that go along with a flow, and the answer to a packet that does not fit
//! into a wrapping.

use super::wrapping::{ICMP, ICMPV6, Ipv4Header, Ipv6Header};
use crate::net::{Be16, V4, V6};

/// Whether an ICMP message quotes a packet (RFC 792): destination unreachable, time exceeded, parameter problem.
#[inline(always)]
pub const fn is_icmp_error(kind: u8) -> bool {
    matches!(kind, 3 | 11 | 12)
}

/// Whether an ICMPv6 message quotes a packet (RFC 4443, types 1 to 4).
#[inline(always)]
pub const fn is_icmpv6_error(kind: u8) -> bool {
    matches!(kind, 1..=4)
}

/// The beginning of a packet, from its IP header on, in an answer to it: 20 bytes more than that header.
pub type Quoted4 = [u16; 20];
/// See [`Quoted4`].
pub type Quoted6 = [u16; 30];

/// "Fragmentation needed and DF set" (RFC 1191), before the quoted packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct TooBig4 {
    ip: Ipv4Header,
    /// Type 3 and code 4.
    kind: [u8; 2],
    checksum: u16,
    unused: u16,
    mtu: Be16,
}

/// "Packet too big" (RFC 4443), before the quoted packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct TooBig6 {
    ip: Ipv6Header,
    /// Type 2 and code 0.
    kind: [u8; 2],
    checksum: u16,
    /// In network byte order.
    mtu: u32,
}

impl TooBig4 {
    /// Tells a client from an address of this node how long its packets may be, in bytes.
    #[inline(always)]
    pub fn new(node: V4, client: V4, mtu: u32, quoted: &Quoted4) -> Self {
        let length = Be16::new((size_of::<Self>() + size_of::<Quoted4>()) as u16);
        let (kind, mtu) = ([3, 4], Be16::new(mtu as u16));
        let checksum = complement(sum(quoted) + u32::from(u16::from_ne_bytes(kind)) + u32::from(mtu.raw()));
        Self { ip: Ipv4Header::new(ICMP, length, node, client), kind, checksum, unused: 0, mtu }
    }
}

impl TooBig6 {
    /// As [`TooBig4::new`].
    #[inline(always)]
    pub fn new(node: V6, client: V6, mtu: u32, quoted: &Quoted6) -> Self {
        let length = Be16::new((size_of::<Self>() - size_of::<Ipv6Header>() + size_of::<Quoted6>()) as u16);
        let (kind, mtu) = ([2, 0], mtu.to_be());
        // With the pseudo-header (RFC 8200, 8.1).
        let addresses = node.raw().into_iter().chain(client.raw()).fold(0, |sum, it| sum + halves(it));
        let pseudo = addresses + u32::from(length.raw()) + u32::from(Be16::new(ICMPV6.into()).raw());
        let checksum = complement(sum(quoted) + pseudo + u32::from(u16::from_ne_bytes(kind)) + halves(mtu));
        Self { ip: Ipv6Header::new(ICMPV6, length, node, client), kind, checksum, mtu }
    }
}

/// The sum of words in memory order, which a checksum (RFC 1071) is the same for on every machine.
#[inline(always)]
fn sum(words: &[u16]) -> u32 {
    words.iter().fold(0, |sum, it| sum + u32::from(*it))
}

#[inline(always)]
const fn halves(word: u32) -> u32 {
    (word & 0xffff) + (word >> 16)
}

#[inline(always)]
const fn complement(sum: u32) -> u16 {
    !(halves(halves(sum)) as u16)
}

const _: () = assert!(size_of::<TooBig4>() == 28);
const _: () = assert!(size_of::<TooBig6>() == 48);

#[cfg(all(test, feature = "user"))]
mod tests {
    use bytemuck::bytes_of;

    use super::*;

    /// The sum of 16-bit words in network byte order, folded: 0xffff if their checksum is right.
    fn folded(bytes: &[u8]) -> u32 {
        let sum: u32 = bytes.chunks(2).map(|it| u32::from(u16::from_be_bytes([it[0], it[1]]))).sum();
        (sum & 0xffff) + (sum >> 16)
    }

    #[test]
    fn checksums_are_right() {
        let node = V4::from(std::net::Ipv4Addr::new(192, 0, 2, 1));
        let client = V4::from(std::net::Ipv4Addr::new(198, 51, 100, 7));
        let quoted: Quoted4 = std::array::from_fn(|it| 0x4503_u16.wrapping_mul(it as u16 + 7));
        let message = TooBig4::new(node, client, 1_456, &quoted);
        let bytes = [bytes_of(&message), bytes_of(&quoted)].concat();
        assert_eq!(folded(&bytes[..20]), 0xffff, "of the header");
        assert_eq!(folded(&bytes[20..]), 0xffff);
        assert_eq!(bytes[20..22], [3, 4]);
        assert_eq!(bytes[26..28], 1_456_u16.to_be_bytes());
        assert_eq!(bytes[2..4], 68_u16.to_be_bytes());
    }

    #[test]
    fn the_checksum_of_ipv6_covers_the_addresses() {
        let [node, client] =
            ["2001:db8::1", "2001:db8:ffff::2"].map(|it| V6::from(it.parse::<std::net::IpAddr>().unwrap()));
        let quoted: Quoted6 = std::array::from_fn(|it| 0x6001_u16.wrapping_mul(it as u16 + 3));
        let message = TooBig6::new(node, client, 1_424, &quoted);
        let bytes = [bytes_of(&message), bytes_of(&quoted)].concat();
        let pseudo = [&bytes[8..40], &[0, 0, 0, 68, 0, 0, 0, 58]].concat();
        assert_eq!(folded(&[&pseudo, &bytes[40..]].concat()), 0xffff);
        assert_eq!(bytes[44..48], 1_424_u32.to_be_bytes());
    }
}
