//! What differs between IPv4 and IPv6 when packets are forwarded: headers, routes, and ICMP messages.

use core::mem::{MaybeUninit, offset_of};

use aya_ebpf::bindings::{
    BPF_F_ADJ_ROOM_ENCAP_L3_IPV4, BPF_F_ADJ_ROOM_ENCAP_L3_IPV6, bpf_fib_lookup as FibLookup, bpf_redir_neigh,
};
use proxy_common::{
    forward::{
        ETH_P_IP, ETH_P_IPV6, Flow, ForwardNode, ICMPV6, Ipv4Header, Ipv6Header, WrapFamily,
        icmp::{Quoted4, Quoted6, TooBig4, TooBig6, is_icmp_error, is_icmpv6_error},
    },
    net::{Be16, V4, V6},
    tables::{Family, TCP},
};

/// The bytes of an Ethernet header.
pub(crate) const ETHERNET: usize = 14;
/// What `bpf_fib_lookup` returns with the next hop and its interface.
pub(crate) const FOUND: i64 = 0;
/// Where the flags are in the header of TCP.
pub(crate) const TCP_FLAGS: usize = 13;
/// A bit of them.
pub(crate) const SYN: u8 = 1 << 1;

/// The flow of a packet with these addresses, and source and destination port; `flags` are those of TCP.
#[inline(always)]
pub(crate) fn flow<F: Family>(
    (source, destination, protocol): (F, F, u8),
    [source_port, destination_port]: [u16; 2],
    flags: impl FnOnce() -> Option<u8>,
) -> Option<Flow> {
    let continues = protocol == TCP && flags()? & SYN == 0;
    let (source, destination) = (source.mapped(), destination.mapped());
    let [source_port, destination_port] = [source_port, destination_port].map(Be16::from_raw);
    Some(Flow { source, destination, source_port, destination_port, protocol, continues })
}

/// An address family: its headers, and how its packets are wrapped.
pub(crate) trait PacketFamily: Family + WrapFamily {
    type Header: Copy;
    /// The beginning of a packet in an answer to it.
    type Quoted: Copy;
    /// The answer to a packet that is too big, before what it quotes.
    type TooBig: Copy;
    /// How the kernel is told about a wrapping.
    const ENCAPSULATION: u32;
    /// The EtherType.
    const ETHERTYPE: Be16;
    /// Where the source address is in the header.
    const SOURCE: usize;
    /// Where the IP protocol number is in the header.
    const PROTOCOL: usize;

    /// Source, destination and protocol of a packet; `None` if it is not handled.
    fn addresses(header: &Self::Header) -> Option<(Self, Self, u8)>;
    /// The header with source and destination exchanged; its checksum stays right.
    fn returned(header: Self::Header) -> Self::Header;
    /// The destination of an ICMP message; `None` if it is not handled.
    fn icmp(header: &Self::Header) -> Option<Self>;
    /// Whether an ICMP message of a type quotes a packet.
    fn is_error(kind: u8) -> bool;
    /// Tells a client how long its packets may be.
    fn too_big(node: Self, client: Self, mtu: u32, quoted: &Self::Quoted) -> Self::TooBig;
    /// The address of a node, `None` if it has none in this family.
    fn of_node(node: &ForwardNode) -> Option<Self>;
    /// A look-up of the route from one address to another.
    fn route(source: Self, destination: Self) -> FibLookup;
    /// The next hop that it has found.
    fn next_hop(found: &FibLookup) -> bpf_redir_neigh;
}

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// A value of a kernel structure with unions, all zeroes.
macro_rules! zeroed {
    ($type:ty) => {
        // SAFETY: it consists of integers.
        unsafe { MaybeUninit::<$type>::zeroed().assume_init() }
    };
}

impl PacketFamily for V4 {
    type Header = Ipv4Header;
    type Quoted = Quoted4;
    type TooBig = TooBig4;
    const ENCAPSULATION: u32 = BPF_F_ADJ_ROOM_ENCAP_L3_IPV4;
    const ETHERTYPE: Be16 = Be16::new(ETH_P_IP);
    const SOURCE: usize = offset_of!(Ipv4Header, source);
    const PROTOCOL: usize = offset_of!(Ipv4Header, protocol);

    #[inline(always)]
    fn too_big(node: Self, client: Self, mtu: u32, quoted: &Quoted4) -> TooBig4 {
        TooBig4::new(node, client, mtu, quoted)
    }

    #[inline(always)]
    fn addresses(header: &Ipv4Header) -> Option<(Self, Self, u8)> {
        header.is_handled().then_some((header.source, header.destination, header.protocol))
    }

    #[inline(always)]
    fn icmp(header: &Ipv4Header) -> Option<Self> {
        header.is_icmp().then_some(header.destination)
    }

    #[inline(always)]
    fn is_error(kind: u8) -> bool {
        is_icmp_error(kind)
    }

    #[inline(always)]
    fn of_node(node: &ForwardNode) -> Option<Self> {
        (node.v4.raw() != 0).then_some(node.v4)
    }

    #[inline(always)]
    fn route(source: Self, destination: Self) -> FibLookup {
        let mut lookup = zeroed!(FibLookup);
        lookup.family = AF_INET;
        lookup.__bindgen_anon_3.ipv4_src = source.raw();
        lookup.__bindgen_anon_4.ipv4_dst = destination.raw();
        lookup
    }

    #[inline(always)]
    fn next_hop(found: &FibLookup) -> bpf_redir_neigh {
        let mut hop = zeroed!(bpf_redir_neigh);
        hop.nh_family = found.family.into();
        // SAFETY: every value is an address.
        hop.__bindgen_anon_1.ipv4_nh = unsafe { found.__bindgen_anon_4.ipv4_dst };
        hop
    }

    #[inline(always)]
    fn returned(header: Ipv4Header) -> Ipv4Header {
        Ipv4Header { source: header.destination, destination: header.source, ..header }
    }
}

impl PacketFamily for V6 {
    type Header = Ipv6Header;
    type Quoted = Quoted6;
    type TooBig = TooBig6;
    const ENCAPSULATION: u32 = BPF_F_ADJ_ROOM_ENCAP_L3_IPV6;
    const ETHERTYPE: Be16 = Be16::new(ETH_P_IPV6);
    const SOURCE: usize = offset_of!(Ipv6Header, source);
    const PROTOCOL: usize = offset_of!(Ipv6Header, protocol);

    #[inline(always)]
    fn too_big(node: Self, client: Self, mtu: u32, quoted: &Quoted6) -> TooBig6 {
        TooBig6::new(node, client, mtu, quoted)
    }

    #[inline(always)]
    fn addresses(header: &Ipv6Header) -> Option<(Self, Self, u8)> {
        header.is_handled().then_some((header.source, header.destination, header.protocol))
    }

    #[inline(always)]
    fn icmp(header: &Ipv6Header) -> Option<Self> {
        (header.protocol == ICMPV6).then_some(header.destination)
    }

    #[inline(always)]
    fn is_error(kind: u8) -> bool {
        is_icmpv6_error(kind)
    }

    #[inline(always)]
    fn of_node(node: &ForwardNode) -> Option<Self> {
        (node.v6 != Self::default()).then_some(node.v6)
    }

    #[inline(always)]
    fn route(source: Self, destination: Self) -> FibLookup {
        let mut lookup = zeroed!(FibLookup);
        lookup.family = AF_INET6;
        lookup.__bindgen_anon_3.ipv6_src = source.raw();
        lookup.__bindgen_anon_4.ipv6_dst = destination.raw();
        lookup
    }

    #[inline(always)]
    fn next_hop(found: &FibLookup) -> bpf_redir_neigh {
        let mut hop = zeroed!(bpf_redir_neigh);
        hop.nh_family = found.family.into();
        // SAFETY: every value is an address.
        hop.__bindgen_anon_1.ipv6_nh = unsafe { found.__bindgen_anon_4.ipv6_dst };
        hop
    }

    #[inline(always)]
    fn returned(header: Ipv6Header) -> Ipv6Header {
        Ipv6Header { source: header.destination, destination: header.source, ..header }
    }
}
