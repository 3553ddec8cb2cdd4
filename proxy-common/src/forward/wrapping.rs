//! How a packet is wrapped: the headers, and the datagram that asks a node whether it unwraps packets.

use crate::{
    net::{Be16, V4, V6},
    tables::{TCP, UDP},
};

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct UdpHeader {
    /// Derived from the flow's hash, so that routers and network cards spread flows.
    pub source: Be16,
    pub destination: Be16,
    /// The length of header and payload, in bytes.
    pub length: Be16,
    /// 0: none (RFC 6935 for IPv6).
    pub checksum: u16,
}

/// The header of Geneve with one option (RFC 8926), without the option's data.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct GeneveHeader {
    /// Version 0 and the length of the option in words.
    version_and_length: u8,
    /// The option is critical: a node that does not know it must drop the packet.
    flags: u8,
    /// The EtherType of the packet inside.
    protocol: Be16,
    /// No virtual network.
    network: u32,
    /// One of the experimental option classes.
    class: Be16,
    /// The option is critical; the type also says the version of the wrapping.
    kind: u8,
    /// The length of the option's data, in words.
    length: u8,
}

/// The bytes of a UDP header, and of a Geneve header without the option's data.
const TUNNEL_BYTES: u16 = 20;
/// `C`: critical options are present.
const CRITICAL: u8 = 0x40;
const OPTION_CLASS: Be16 = Be16::new(0xff4b);
/// With the critical bit, and the version of the wrapping.
const OPTION_KIND: u8 = 0x81;
/// The type of a probe's option: critical, and the version of the wrapping that it asks for.
const PROBE_KIND: u8 = 0x82;
/// `O`: no packet is inside.
const CONTROL: u8 = 0x80;

impl GeneveHeader {
    const fn new(protocol: u16, data_words: u8) -> Self {
        Self {
            version_and_length: 1 + data_words,
            flags: CRITICAL,
            protocol: Be16::new(protocol),
            network: 0,
            class: OPTION_CLASS,
            kind: OPTION_KIND,
            length: data_words,
        }
    }
}

/// A datagram that asks a node whether it unwraps packets, sent to the port of wrapped packets. A program that knows this version
/// of the wrapping returns it unchanged.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct Probe {
    geneve: GeneveHeader,
    /// Tells an answer from a forged one.
    pub token: [u32; 2],
}

impl Probe {
    pub const fn new(token: [u32; 2]) -> Self {
        let geneve = GeneveHeader { flags: CONTROL | CRITICAL, kind: PROBE_KIND, ..GeneveHeader::new(0, 2) };
        Self { geneve, token }
    }

    #[inline(always)]
    pub fn is_probe(&self) -> bool {
        *self == Self::new(self.token)
    }
}

/// The IPv4 header without options.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct Ipv4Header {
    /// 0x45: version 4, and five words.
    pub version_and_length: u8,
    /// DSCP and ECN.
    pub tos: u8,
    /// The length of header and payload, in bytes.
    pub length: Be16,
    pub id: Be16,
    /// The flags and the offset of a fragment.
    pub fragment: Be16,
    pub ttl: u8,
    pub protocol: u8,
    pub checksum: u16,
    pub source: V4,
    pub destination: V4,
}

pub const ICMP: u8 = 1;
pub const ICMPV6: u8 = 58;

/// More fragments, or not the first one.
const FRAGMENT: u16 = 0x3fff;
const DO_NOT_FRAGMENT: Be16 = Be16::new(0x4000);
const HOP_LIMIT: u8 = 64;

impl Ipv4Header {
    /// Makes the header of a packet of `length` bytes from this node, with its checksum.
    #[inline(always)]
    pub(super) fn new(protocol: u8, length: Be16, source: V4, destination: V4) -> Self {
        let header = Self {
            version_and_length: 0x45,
            tos: 0,
            length,
            id: Be16::new(0),
            fragment: DO_NOT_FRAGMENT,
            ttl: HOP_LIMIT,
            protocol,
            checksum: 0,
            source,
            destination,
        };
        header.checked()
    }

    /// Whether it has no options, is no fragment, and contains TCP or UDP.
    #[inline(always)]
    pub const fn is_handled(&self) -> bool {
        self.version_and_length == 0x45
            && self.fragment.get() & FRAGMENT == 0
            && matches!(self.protocol, TCP | UDP)
    }

    #[inline(always)]
    pub const fn is_icmp(&self) -> bool {
        self.version_and_length == 0x45 && self.fragment.get() & FRAGMENT == 0 && self.protocol == ICMP
    }

    /// Fills in the checksum (RFC 1071).
    #[inline(always)]
    fn checked(mut self) -> Self {
        let [a, b] = [self.source, self.destination].map(|it| u32::from_be(it.raw()));
        let words = [self.length, self.id, self.fragment].map(|it| u32::from(it.get()));
        let bytes = [(self.version_and_length, self.tos), (self.ttl, self.protocol)];
        let mut sum: u32 = (a >> 16) + (a & 0xffff) + (b >> 16) + (b & 0xffff);
        sum += words[0] + words[1] + words[2];
        for (high, low) in bytes {
            sum += u32::from(high) << 8 | u32::from(low);
        }
        sum = (sum >> 16) + (sum & 0xffff);
        sum += sum >> 16;
        self.checksum = Be16::new(!(sum as u16)).raw();
        self
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct Ipv6Header {
    /// Version, traffic class and flow label, in network byte order.
    pub version_and_class: u32,
    /// The length of the payload, in bytes.
    pub length: Be16,
    /// The IP protocol number of the payload, or the type of an extension header.
    pub protocol: u8,
    pub hop_limit: u8,
    pub source: V6,
    pub destination: V6,
}

impl Ipv6Header {
    /// Makes the header of a packet from this node with `length` bytes of payload.
    #[inline(always)]
    pub(super) const fn new(protocol: u8, length: Be16, source: V6, destination: V6) -> Self {
        let version_and_class = 0x6000_0000_u32.to_be();
        Self { version_and_class, length, protocol, hop_limit: HOP_LIMIT, source, destination }
    }

    #[inline(always)]
    pub const fn is_handled(&self) -> bool {
        matches!(self.protocol, TCP | UDP)
    }

    #[inline(always)]
    pub const fn is_icmp(&self) -> bool {
        self.protocol == ICMPV6
    }
}

/// An address family, by the type of its addresses: how its packets are wrapped.
pub trait WrapFamily: Sized {
    /// The headers before the packet.
    type Wrapping: Copy;

    fn wrap(to: Wrap<Self>) -> Self::Wrapping;
    /// The node that sent the packet, and the second (unspecified if there is none); `None` if the wrapping is not ours.
    fn unwrap(wrapping: &Self::Wrapping) -> Option<(Self, Self)>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrap<A> {
    /// This node.
    pub source: A,
    pub destination: A,
    /// The second; the unspecified address if there is none.
    pub second: A,
    /// The length of the packet with its IP header, in bytes.
    pub length: u32,
    /// The hash of its flow, from which the outer source port comes.
    pub hash: u32,
    /// The UDP port that wrapped packets are sent to.
    pub port: Be16,
}

/// The headers before an IPv4 packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct Wrapping4 {
    pub ip: Ipv4Header,
    pub udp: UdpHeader,
    pub geneve: GeneveHeader,
    /// The option's data: the second.
    pub second: V4,
}

/// The headers before an IPv6 packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct Wrapping6 {
    pub ip: Ipv6Header,
    pub udp: UdpHeader,
    pub geneve: GeneveHeader,
    /// The option's data: the second.
    pub second: V6,
}

pub const ETH_P_IP: u16 = 0x0800;
pub const ETH_P_IPV6: u16 = 0x86dd;

/// A length as headers have it. A packet of several segments may be longer than they can say; what splits it corrects them.
#[inline(always)]
const fn length(bytes: u32) -> Be16 {
    Be16::new(if bytes > 0xffff { 0xffff } else { bytes as u16 })
}

#[inline(always)]
const fn udp<A>(wrap: &Wrap<A>, data: u16) -> UdpHeader {
    UdpHeader {
        // A dynamic port (RFC 6335).
        source: Be16::new(0xc000 | (wrap.hash >> 16) as u16),
        destination: wrap.port,
        length: length(wrap.length + (TUNNEL_BYTES + data) as u32),
        checksum: 0,
    }
}

impl WrapFamily for V4 {
    type Wrapping = Wrapping4;

    #[inline(always)]
    fn wrap(to: Wrap<Self>) -> Wrapping4 {
        let length = length(to.length + size_of::<Wrapping4>() as u32);
        let ip = Ipv4Header::new(UDP, length, to.source, to.destination);
        Wrapping4 { ip, udp: udp(&to, 4), geneve: GeneveHeader::new(ETH_P_IP, 1), second: to.second }
    }

    #[inline(always)]
    fn unwrap(&Wrapping4 { ip, geneve, second, .. }: &Wrapping4) -> Option<(Self, Self)> {
        (geneve == GeneveHeader::new(ETH_P_IP, 1)).then_some((ip.source, second))
    }
}

impl WrapFamily for V6 {
    type Wrapping = Wrapping6;

    #[inline(always)]
    fn wrap(to: Wrap<Self>) -> Wrapping6 {
        let outside = size_of::<Wrapping6>() - size_of::<Ipv6Header>();
        let ip = Ipv6Header::new(UDP, length(to.length + outside as u32), to.source, to.destination);
        Wrapping6 { ip, udp: udp(&to, 16), geneve: GeneveHeader::new(ETH_P_IPV6, 4), second: to.second }
    }

    #[inline(always)]
    fn unwrap(&Wrapping6 { ip, geneve, second, .. }: &Wrapping6) -> Option<(Self, Self)> {
        (geneve == GeneveHeader::new(ETH_P_IPV6, 4)).then_some((ip.source, second))
    }
}

const _: () = assert!(size_of::<Probe>() == 20);
const _: () = assert!(size_of::<Wrapping4>() == 44);
const _: () = assert!(size_of::<Wrapping6>() == 76);
