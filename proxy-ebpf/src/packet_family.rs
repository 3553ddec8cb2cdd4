//! What differs between IPv4 and IPv6 when packets are forwarded: headers, routes, and ICMP messages.

use core::mem::{MaybeUninit, offset_of};

use aya_ebpf::bindings::{
    BPF_F_ADJ_ROOM_ENCAP_L3_IPV4, BPF_F_ADJ_ROOM_ENCAP_L3_IPV6, bpf_fib_lookup as FibLookup, bpf_redir_neigh,
};
use proxy_common::{
    forward::{
        ETH_P_IP, ETH_P_IPV6, Flow, ForwardNode, Ipv4Header, Ipv6Header, WrapFamily,
        icmp::{Quoted4, Quoted6, TooBig4, TooBig6, is_icmp_error, is_icmpv6_error},
    },
    net::{Be16, V4, V6},
    tables::{Family, TCP},
};

use crate::side::FamilyTables;

/// The bytes of an Ethernet header.
pub(crate) const ETHERNET: usize = 14;
/// What `bpf_fib_lookup` returns with the next hop and its interface.
pub(crate) const FOUND: i64 = 0;
/// The offset of the flags in the TCP header.
pub(crate) const TCP_FLAGS: usize = 13;
/// The SYN bit of the TCP flags.
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

/// An address family: its tables, its headers, and how its packets are wrapped.
pub(crate) trait PacketFamily: FamilyTables + WrapFamily {
    type Header: Copy;
    /// The beginning of a packet in an answer to it.
    type Quoted: Copy;
    /// The answer to a packet that is too big, before what it quotes.
    type TooBig: Copy;
    /// How the kernel is told about a wrapping.
    const ENCAPSULATION: u32;
    const ETHERTYPE: Be16;
    /// The offset of the source address in the header.
    const SOURCE: usize;
    /// The offset of the IP protocol number in the header.
    const PROTOCOL: usize;

    /// Source, destination and protocol of a packet; `None` if it is not handled.
    fn addresses(header: &Self::Header) -> Option<(Self, Self, u8)>;
    /// The header with source and destination exchanged; its checksum stays right.
    fn returned(header: Self::Header) -> Self::Header;
    /// The destination of an ICMP message; `None` if it is not handled.
    fn icmp(header: &Self::Header) -> Option<Self>;
    /// Whether an ICMP message of this type quotes a packet.
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

macro_rules! zeroed {
    ($type:ty) => {
        // SAFETY: it consists of integers.
        unsafe { MaybeUninit::<$type>::zeroed().assume_init() }
    };
}

/// Implements [`PacketFamily`]. The functions of both families differ only in the names of types and fields.
macro_rules! packet_family {
    (
        $family:ty, $node:ident, $header:ident, $quoted:ident, $too_big:ident;
        ethertype: $ethertype:ident, encapsulation: $encapsulation:ident;
        is_error: $is_error:ident;
        family: $af:ident, route: $from:ident -> $to:ident, next_hop: $next_hop:ident
    ) => {
        impl PacketFamily for $family {
            type Header = $header;
            type Quoted = $quoted;
            type TooBig = $too_big;
            const ENCAPSULATION: u32 = $encapsulation;
            const ETHERTYPE: Be16 = Be16::new($ethertype);
            const SOURCE: usize = offset_of!($header, source);
            const PROTOCOL: usize = offset_of!($header, protocol);

            #[inline(always)]
            fn addresses(header: &$header) -> Option<(Self, Self, u8)> {
                header.is_handled().then_some((header.source, header.destination, header.protocol))
            }

            #[inline(always)]
            fn returned(header: $header) -> $header {
                $header { source: header.destination, destination: header.source, ..header }
            }

            #[inline(always)]
            fn icmp(header: &$header) -> Option<Self> {
                header.is_icmp().then_some(header.destination)
            }

            #[inline(always)]
            fn is_error(kind: u8) -> bool {
                $is_error(kind)
            }

            #[inline(always)]
            fn too_big(node: Self, client: Self, mtu: u32, quoted: &$quoted) -> $too_big {
                $too_big::new(node, client, mtu, quoted)
            }

            #[inline(always)]
            fn of_node(node: &ForwardNode) -> Option<Self> {
                (node.$node != Self::default()).then_some(node.$node)
            }

            #[inline(always)]
            fn route(source: Self, destination: Self) -> FibLookup {
                let mut lookup = zeroed!(FibLookup);
                lookup.family = $af;
                lookup.__bindgen_anon_3.$from = source.raw();
                lookup.__bindgen_anon_4.$to = destination.raw();
                lookup
            }

            #[inline(always)]
            fn next_hop(found: &FibLookup) -> bpf_redir_neigh {
                let mut hop = zeroed!(bpf_redir_neigh);
                hop.nh_family = found.family.into();
                // SAFETY: every value is an address.
                hop.__bindgen_anon_1.$next_hop = unsafe { found.__bindgen_anon_4.$to };
                hop
            }
        }
    };
}

packet_family! {
    V4, v4, Ipv4Header, Quoted4, TooBig4;
    ethertype: ETH_P_IP, encapsulation: BPF_F_ADJ_ROOM_ENCAP_L3_IPV4;
    is_error: is_icmp_error;
    family: AF_INET, route: ipv4_src -> ipv4_dst, next_hop: ipv4_nh
}

packet_family! {
    V6, v6, Ipv6Header, Quoted6, TooBig6;
    ethertype: ETH_P_IPV6, encapsulation: BPF_F_ADJ_ROOM_ENCAP_L3_IPV6;
    is_error: is_icmpv6_error;
    family: AF_INET6, route: ipv6_src -> ipv6_dst, next_hop: ipv6_nh
}
