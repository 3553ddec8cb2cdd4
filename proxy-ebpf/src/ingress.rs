//! ingress, egress: forwards packets from outside whole to the node that serves them, and unwraps what other nodes forward.
//!
//! Attached to the uplinks. Invariant: a packet that is not forwarded goes on unchanged ([`NEXT`]).

use core::mem::MaybeUninit;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{
        __sk_buff, BPF_F_ADJ_ROOM_ENCAP_L3_IPV4, BPF_F_ADJ_ROOM_ENCAP_L3_IPV6, BPF_F_ADJ_ROOM_ENCAP_L4_UDP,
        BPF_F_ADJ_ROOM_FIXED_GSO, TC_ACT_SHOT, TC_ACT_UNSPEC, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC,
        bpf_fib_lookup as FibLookup, bpf_redir_neigh,
    },
    helpers::generated::{bpf_check_mtu, bpf_fib_lookup, bpf_redirect_neigh},
    macros::classifier,
    programs::TcContext,
};
use proxy_common::{
    forward::{
        self, ETH_P_IP, ETH_P_IPV6, FORWARDED, FORWARDED_MASK, Flow, Forward, ForwardNode, ForwardTables,
        Ipv4Header, Ipv6Header, NO_NODE, NO_SECOND, NodeNumber, Row, THIS_NODE, Unwrapped, Way, Wrap,
        WrapFamily,
    },
    net::{Be16, V4, V6},
    tables::{Family, FrontendKey6, TCP, UDP},
};

use crate::{
    config::FORWARDING_PORT,
    maps::{FORWARD_NODES, FORWARD_NUMBERS, FORWARD_ROWS, FORWARDS},
    side::{FamilyTables, Side},
};

/// The packet goes on: to the next program, and up the stack.
const NEXT: i32 = TC_ACT_UNSPEC;
/// The packet is dropped.
const DROP: i32 = TC_ACT_SHOT as i32;
/// The bytes of an Ethernet header.
const ETHERNET: usize = 14;
/// The bytes of a TCP header without options.
const TCP_HEADER: usize = 20;
/// Bits of TCP's flags.
const SYN: u8 = 1 << 1;
const ACK: u8 = 1 << 4;
/// TCP's option of the maximum segment size.
const MSS: u8 = 2;

/// The packets that arrive at an uplink.
#[classifier]
pub(crate) fn ingress(ctx: TcContext) -> i32 {
    by_family(&ctx, arrived4, arrived6)
}

/// The packets that leave through an uplink: those whose connection is unknown here go to the second, and answers to clients
/// leave room for the wrapping.
#[classifier]
pub(crate) fn egress(ctx: TcContext) -> i32 {
    if priority(&ctx) & FORWARDED_MASK == FORWARDED {
        by_family(&ctx, returned4, returned6)
    } else {
        by_family(&ctx, answered4, answered6)
    }
}

/// A function for packets of one family, with a frame of its own: the stack has 512 bytes.
macro_rules! function {
    ($name:ident, $of:ident::<$family:ty>) => {
        #[inline(never)]
        fn $name(skb: *mut __sk_buff) -> i32 {
            $of::<$family>(&TcContext::new(skb)).unwrap_or(NEXT)
        }
    };
}

function!(arrived4, arrived::<V4>);
function!(arrived6, arrived::<V6>);
function!(returned4, returned::<V4>);
function!(returned6, returned::<V6>);
function!(answered4, answered::<V4>);
function!(answered6, answered::<V6>);

#[inline(always)]
fn by_family(ctx: &TcContext, v4: impl Fn(*mut __sk_buff) -> i32, v6: impl Fn(*mut __sk_buff) -> i32) -> i32 {
    let skb = ctx.skb.skb;
    // SAFETY: the kernel passes a valid context, and the verifier checks every access to it.
    let protocol = unsafe { (&raw const (*skb).protocol).read_volatile() };
    match Be16::from_raw(protocol as u16).get() {
        ETH_P_IP => v4(skb),
        ETH_P_IPV6 => v6(skb),
        _ => NEXT,
    }
}

/// An address family: its headers, and how its packets are wrapped.
pub(crate) trait PacketFamily: FamilyTables + WrapFamily {
    type Header: Copy;
    /// How the kernel is told about a wrapping.
    const ENCAPSULATION: u32;

    /// Source, destination and protocol of a packet; `None` if it is not handled.
    fn addresses(header: &Self::Header) -> Option<(Self, Self, u8)>;
    /// The address of a node, `None` if it has none in this family.
    fn of_node(node: &ForwardNode) -> Option<Self>;
    /// A look-up of the route from one address to another.
    fn route(source: Self, destination: Self) -> FibLookup;
    /// The next hop that it has found.
    fn next_hop(found: &FibLookup) -> bpf_redir_neigh;
    /// [`unwrap`] in a frame of its own.
    fn unwrap_in_frame(skb: *mut __sk_buff, side: u32) -> i32;
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
    const ENCAPSULATION: u32 = BPF_F_ADJ_ROOM_ENCAP_L3_IPV4;

    #[inline(always)]
    fn addresses(header: &Ipv4Header) -> Option<(Self, Self, u8)> {
        header.is_handled().then_some((header.source, header.destination, header.protocol))
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
    fn unwrap_in_frame(skb: *mut __sk_buff, side: u32) -> i32 {
        unwrap4(skb, side)
    }
}

impl PacketFamily for V6 {
    type Header = Ipv6Header;
    const ENCAPSULATION: u32 = BPF_F_ADJ_ROOM_ENCAP_L3_IPV6;

    #[inline(always)]
    fn addresses(header: &Ipv6Header) -> Option<(Self, Self, u8)> {
        header.is_handled().then_some((header.source, header.destination, header.protocol))
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
    fn unwrap_in_frame(skb: *mut __sk_buff, side: u32) -> i32 {
        unwrap6(skb, side)
    }
}

// SAFETY of every `get` below: user space never writes to the tables of a side that a program may still be reading.

impl<F> ForwardTables for Side<F> {
    #[inline(always)]
    fn forward(&self, frontend: FrontendKey6) -> Option<Forward> {
        // SAFETY: see above.
        unsafe { FORWARDS.get(self.index())?.get(frontend) }.copied()
    }

    #[inline(always)]
    fn row(&self, position: u32) -> Option<Row> {
        FORWARD_ROWS.get(self.index())?.get(position).copied()
    }
}

impl<F: PacketFamily> Side<F> {
    #[inline(always)]
    fn node(&self, number: NodeNumber) -> Option<F> {
        if number == NO_NODE {
            return None;
        }
        F::of_node(FORWARD_NODES.get(self.index())?.get(number.into())?)
    }

    #[inline(always)]
    fn number(&self, address: F) -> Option<NodeNumber> {
        // SAFETY: see above.
        unsafe { FORWARD_NUMBERS.get(self.index())?.get(address.mapped()) }.map(|it| *it as NodeNumber)
    }
}

#[inline(always)]
fn arrived<F: PacketFamily>(ctx: &TcContext) -> Option<i32> {
    let header: F::Header = ctx.load(ETHERNET).ok()?;
    let (source, destination, protocol) = F::addresses(&header)?;
    let side = Side::<F>::active()?;
    let transport = ETHERNET + size_of::<F::Header>();
    if protocol == UDP && destination_port(ctx, transport)?.raw() == FORWARDING_PORT.load() as u16 {
        return (side.node(THIS_NODE)? == destination).then(|| F::unwrap_in_frame(ctx.skb.skb, side.index()));
    }
    if !destination.may_be_frontend(proxy_common::decide::Tables::prefilter(&side)?) {
        return None;
    }
    let flow = flow(ctx, transport, (source, destination, protocol))?;
    match forward::way(&side, &flow) {
        Way::Pass => None,
        Way::Here { second } => {
            // One that has gone has no address.
            let second = side.node(second).map_or(NO_NODE, |_| second);
            set_priority(ctx, forward::priority(second));
            None
        }
        Way::To { node, second } => {
            let second = side.node(second).unwrap_or_default();
            Some(send(ctx, &side, &flow, side.node(node)?, second))
        }
    }
}

/// Takes the packet out of its wrapping, if a node has sent it and it is for a frontend that is forwarded. Other datagrams to the
/// port pass.
#[inline(always)]
fn unwrap<F: PacketFamily>(ctx: &TcContext, side: &Side<F>) -> i32 {
    let wrapping = ctx.load(ETHERNET).ok();
    let Some(Unwrapped { source, second, .. }) = wrapping.and_then(|it: F::Wrapping| F::unwrap(&it)) else {
        return NEXT;
    };
    let taken = || {
        side.number(source).filter(|it| *it != THIS_NODE)?;
        let inner = ETHERNET + size_of::<F::Wrapping>();
        let header: F::Header = ctx.load(inner).ok()?;
        let flow = flow(ctx, inner + size_of::<F::Header>(), F::addresses(&header)?)?;
        side.forward(flow.frontend())?;
        let flags = u64::from(BPF_F_ADJ_ROOM_FIXED_GSO);
        ctx.adjust_room(-(size_of::<F::Wrapping>() as i32), BPF_ADJ_ROOM_MAC, flags).ok()?;
        Some(if flow.continues { side.number(second).unwrap_or(NO_NODE) } else { NO_NODE })
    };
    let Some(second) = taken() else { return DROP };
    set_priority(ctx, forward::priority(second));
    NEXT
}

#[inline(never)]
fn unwrap4(skb: *mut __sk_buff, side: u32) -> i32 {
    unwrap(&TcContext::new(skb), &Side::<V4>::of(side))
}

#[inline(never)]
fn unwrap6(skb: *mut __sk_buff, side: u32) -> i32 {
    unwrap(&TcContext::new(skb), &Side::<V6>::of(side))
}

/// Gives a packet to the second, whose number is in its priority. What was translated goes on, without that priority: IPv6 has not
/// replaced it.
#[inline(always)]
fn returned<F: PacketFamily>(ctx: &TcContext) -> Option<i32> {
    let second = priority(ctx) as NodeNumber;
    set_priority(ctx, 0);
    let header: F::Header = ctx.load(ETHERNET).ok()?;
    let addresses = F::addresses(&header)?;
    let side = Side::<F>::active()?;
    let flow = flow(ctx, ETHERNET + size_of::<F::Header>(), addresses)?;
    side.forward(flow.frontend())?;
    // What begins on this node has no interface that it arrived at: it may have any priority.
    if second == NO_SECOND || arrival_interface(ctx) == 0 {
        return None;
    }
    let Some(node) = side.node(second) else { return Some(DROP) };
    Some(send(ctx, &side, &flow, node, F::default()))
}

/// Reduces the maximum segment size that an answer to a SYN allows, so that the client's packets fit into a wrapping.
#[inline(always)]
fn answered<F: PacketFamily>(ctx: &TcContext) -> Option<i32> {
    let header: F::Header = ctx.load(ETHERNET).ok()?;
    let (frontend, _, TCP) = F::addresses(&header)? else { return None };
    let transport = ETHERNET + size_of::<F::Header>();
    let [offset, flags] = ctx.load::<[u8; 2]>(transport + 12).ok()?;
    // Every stack has the option first.
    if flags & (SYN | ACK) != SYN | ACK || offset >> 4 < 6 {
        return None;
    }
    let option = transport + TCP_HEADER;
    let [kind, length, high, low] = ctx.load::<[u8; 4]>(option).ok()?;
    let side = Side::<F>::active()?;
    let port = Be16::from_raw(ctx.load(transport).ok()?);
    let key = FrontendKey6 { address: frontend.mapped(), port, protocol: TCP, zero: 0 };
    if kind != MSS || length != 4 || side.forward(key).is_none() {
        return None;
    }
    let mut mtu = 0;
    // SAFETY: the kernel reads and writes one integer, which outlives the call.
    let _ = unsafe { bpf_check_mtu(ctx.as_ptr(), 0, &raw mut mtu, 0, 0) };
    let headers = size_of::<F::Wrapping>() + size_of::<F::Header>() + TCP_HEADER;
    let room = mtu.checked_sub(headers as u32)?;
    let (old, new) = (u16::from_be_bytes([high, low]), room as u16);
    if u32::from(old) > room {
        let (old, new) = (Be16::new(old).raw(), Be16::new(new).raw());
        ctx.l4_csum_replace(transport + 16, old.into(), new.into(), 2).ok()?;
        ctx.store(option + 2, &new, 0).ok()?;
    }
    None
}

/// Sends a packet to a node.
#[inline(always)]
fn send<F: PacketFamily>(ctx: &TcContext, side: &Side<F>, flow: &Flow, node: F, second: F) -> i32 {
    let sent = || {
        let source = side.node(THIS_NODE)?;
        let mut lookup = F::route(source, node);
        lookup.ifindex = interface(ctx);
        // SAFETY: the structure is of the size that is passed.
        let found =
            unsafe { bpf_fib_lookup(ctx.as_ptr(), &raw mut lookup, size_of::<FibLookup>() as i32, 0) };
        if found != FOUND && found != NO_NEIGHBOR {
            return None;
        }
        let length = ctx.len().wrapping_sub(ETHERNET as u32);
        let wrapping = F::wrap(Wrap {
            source,
            destination: node,
            second,
            length,
            hash: flow.hash(false),
            port: Be16::from_raw(FORWARDING_PORT.load() as u16),
        });
        // What splits a large packet must know of the wrapping. The kernel wraps no packet that it knows as wrapped, nor does it
        // forget that when the wrapping is removed: a small one is not said to be.
        let encapsulation = if is_large(ctx) { BPF_F_ADJ_ROOM_ENCAP_L4_UDP | F::ENCAPSULATION } else { 0 };
        let flags = u64::from(BPF_F_ADJ_ROOM_FIXED_GSO | encapsulation);
        ctx.adjust_room(size_of::<F::Wrapping>() as i32, BPF_ADJ_ROOM_MAC, flags).ok()?;
        ctx.store(ETHERNET, &wrapping, 0).ok()?;
        let mut hop = F::next_hop(&lookup);
        // SAFETY: as above.
        let verdict = unsafe {
            bpf_redirect_neigh(lookup.ifindex, &raw mut hop, size_of::<bpf_redir_neigh>() as i32, 0)
        };
        Some(verdict as i32)
    };
    sent().unwrap_or(DROP)
}

/// What `bpf_fib_lookup` returns with the next hop and its interface.
const FOUND: i64 = 0;
/// The same, while the address of its interface is not known yet.
const NO_NEIGHBOR: i64 = 7;

#[inline(always)]
fn flow<F: Family>(
    ctx: &TcContext,
    transport: usize,
    (source, destination, protocol): (F, F, u8),
) -> Option<Flow> {
    let [source_port, destination_port] = ctx.load::<[u16; 2]>(transport).ok()?.map(Be16::from_raw);
    // The flags are in the 14th byte of the header.
    let continues = protocol == TCP && ctx.load::<u8>(transport + 13).ok()? & SYN == 0;
    let (source, destination) = (source.mapped(), destination.mapped());
    Some(Flow { source, destination, source_port, destination_port, protocol, continues })
}

#[inline(always)]
fn destination_port(ctx: &TcContext, transport: usize) -> Option<Be16> {
    ctx.load::<u16>(transport + 2).ok().map(Be16::from_raw)
}

#[inline(always)]
fn priority(ctx: &TcContext) -> u32 {
    // SAFETY: the kernel passes a valid context, and the verifier checks every access to it.
    unsafe { (&raw const (*ctx.skb.skb).priority).read_volatile() }
}

#[inline(always)]
fn set_priority(ctx: &TcContext, priority: u32) {
    // SAFETY: as for `priority`.
    unsafe { (&raw mut (*ctx.skb.skb).priority).write_volatile(priority) }
}

/// The interface that the packet arrived at, or leaves by.
#[inline(always)]
fn interface(ctx: &TcContext) -> u32 {
    // SAFETY: as for `priority`.
    unsafe { (&raw const (*ctx.skb.skb).ifindex).read_volatile() }
}

/// The interface that a packet that leaves has arrived at; 0 if it begins here.
#[inline(always)]
fn arrival_interface(ctx: &TcContext) -> u32 {
    // SAFETY: as for `priority`.
    unsafe { (&raw const (*ctx.skb.skb).ingress_ifindex).read_volatile() }
}

/// Whether the packet is several segments in one.
#[inline(always)]
fn is_large(ctx: &TcContext) -> bool {
    // SAFETY: as for `priority`.
    unsafe { (&raw const (*ctx.skb.skb).gso_size).read_volatile() != 0 }
}
