//! ingress, egress: forwards packets from outside whole to the node that serves them, and unwraps what other nodes forward.
//!
//! Attached to the uplinks. Invariant: a packet that is not forwarded goes on unchanged ([`NEXT`]).

use aya_ebpf::{
    EbpfContext as _,
    bindings::{
        __sk_buff, BPF_F_ADJ_ROOM_ENCAP_L4_UDP, BPF_F_ADJ_ROOM_FIXED_GSO, TC_ACT_SHOT, TC_ACT_UNSPEC,
        bpf_adj_room_mode::BPF_ADJ_ROOM_MAC, bpf_fib_lookup as FibLookup, bpf_redir_neigh,
    },
    helpers::generated::{
        bpf_check_mtu, bpf_fib_lookup, bpf_redirect, bpf_redirect_neigh, bpf_skb_change_tail,
    },
    macros::classifier,
    programs::TcContext,
};
use proxy_common::{
    counters::{DROPPED, ForwardCounters, RECEIVED, SECOND_CHANCES, SENT, SERVED},
    forward::{
        self, ETH_P_IP, ETH_P_IPV6, FORWARDED, FORWARDED_MASK, Flow, ForwardTables, MAX_NODE, NO_NODE,
        NO_SECOND, NodeNumber, Probe, THIS_NODE, WRAPPED, Way, Wrap,
    },
    net::{Be16, V4, V6},
    tables::{FrontendKey6, TCP, UDP},
};

use crate::{
    config::FORWARDING_PORT,
    counters,
    packet_family::{ETHERNET, FOUND, PacketFamily, SYN, TCP_FLAGS, flow},
    packet_path,
    side::Side,
    skb::{
        arrival_interface, byte, interface, is_large, priority, protocol, scratch, segments, set_priority,
        set_scratch,
    },
};

/// The packet goes on: to the next program, and up the stack.
const NEXT: i32 = TC_ACT_UNSPEC;
const DROP: i32 = TC_ACT_SHOT as i32;
/// Stands for a verdict: the packet is one for the port of wrapped packets.
const UNWRAP: i32 = i32::MIN;
/// Stands for a verdict: the packet is an ICMP message.
const ICMP: i32 = i32::MIN + 1;
/// Stands for a verdict: the packet is too big for a wrapping, and the [`scratch`] says for how many bytes there is room.
const TOO_BIG: i32 = i32::MIN + 2;
/// Stands for a verdict: the packet goes on to the node whose number is in the lower half of the [`scratch`]; the upper one has the
/// number of its second.
const ONWARD: i32 = i32::MIN + 3;
const UDP_HEADER: usize = 8;
/// The bytes of a TCP header without options.
const TCP_HEADER: usize = 20;
/// A bit of TCP's flags.
const ACK: u8 = 1 << 4;
/// TCP's option of the maximum segment size.
const MSS: u8 = 2;

#[classifier]
pub(crate) fn ingress(ctx: TcContext) -> i32 {
    let verdict = match by_family(&ctx, arrived4, arrived6) {
        UNWRAP => by_family(&ctx, unwrap4, unwrap6),
        ICMP => by_family(&ctx, error_arrived4, error_arrived6),
        verdict => verdict,
    };
    carried_out(&ctx, verdict)
}

/// The packets that leave through an uplink: those whose connection is unknown here go to the second, answers to clients leave room
/// for the wrapping, and only this program wraps packets for other nodes.
#[classifier]
pub(crate) fn egress(ctx: TcContext) -> i32 {
    let priority = priority(&ctx);
    // What begins on this node may have any priority.
    if priority & FORWARDED_MASK != FORWARDED || arrival_interface(&ctx) == 0 {
        return by_family(&ctx, leaves4, leaves6);
    }
    if priority == WRAPPED {
        set_priority(&ctx, 0);
        return NEXT;
    }
    let verdict = by_family(&ctx, returned4, returned6);
    carried_out(&ctx, verdict)
}

/// Sends a packet that goes on to another node, and answers one that is too big for that.
#[inline(always)]
fn carried_out(ctx: &TcContext, mut verdict: i32) -> i32 {
    if verdict == ONWARD {
        verdict = by_family(ctx, onward4, onward6);
    }
    if verdict == TOO_BIG { by_family(ctx, too_big4, too_big6) } else { verdict }
}

/// A function for packets of one family, with a frame of its own: the stack has 512 bytes, so what one leaves to another is called
/// when it has returned.
macro_rules! function {
    ($name:ident, $of:ident::<$family:ty>) => {
        #[inline(never)]
        fn $name(skb: *mut __sk_buff) -> i32 {
            $of::<$family>(&TcContext::new(skb)).unwrap_or(NEXT)
        }
    };
}

function!(error_arrived4, error_arrived::<V4>);
function!(error_arrived6, error_arrived::<V6>);
function!(unwrap4, unwrap::<V4>);
function!(unwrap6, unwrap::<V6>);
function!(too_big4, too_big::<V4>);
function!(too_big6, too_big::<V6>);
function!(arrived4, arrived::<V4>);
function!(arrived6, arrived::<V6>);
function!(returned4, returned::<V4>);
function!(returned6, returned::<V6>);
function!(onward4, onward::<V4>);
function!(onward6, onward::<V6>);
function!(leaves4, leaves::<V4>);
function!(leaves6, leaves::<V6>);

#[inline(always)]
fn by_family(ctx: &TcContext, v4: impl Fn(*mut __sk_buff) -> i32, v6: impl Fn(*mut __sk_buff) -> i32) -> i32 {
    match protocol(ctx).get() {
        ETH_P_IP => v4(ctx.skb.skb),
        ETH_P_IPV6 => v6(ctx.skb.skb),
        _ => NEXT,
    }
}

#[inline(always)]
fn arrived<F: PacketFamily>(ctx: &TcContext) -> Option<i32> {
    let header: F::Header = ctx.load(ETHERNET).ok()?;
    let Some((source, destination, protocol)) = F::addresses(&header) else {
        return F::icmp(&header).map(|_| ICMP);
    };
    let side = Side::<F>::active()?;
    let transport = ETHERNET + size_of::<F::Header>();
    if protocol == UDP && ctx.load::<u16>(transport + 2).ok()? == FORWARDING_PORT.load() as u16 {
        return (side.node(THIS_NODE)? == destination).then_some(UNWRAP);
    }
    if !destination.may_be_frontend(proxy_common::decide::Tables::prefilter(&side)?) {
        return None;
    }
    let flow = flow_at(ctx, transport, (source, destination, protocol))?;
    match forward::way(&side, &flow) {
        Way::Pass => None,
        Way::Here { counters, second } => {
            counters::packets(counters.arrived + SERVED, segments(ctx), ctx.len());
            // One that has gone has no address.
            let second = side.node(second & MAX_NODE).map_or(NO_NODE, |_| second);
            set_priority(ctx, forward::priority(second));
            None
        }
        Way::To { counters, node, second } => {
            counters::packets(counters.arrived + SENT, segments(ctx), ctx.len());
            Some(onward_to(ctx, node, second))
        }
    }
}

/// An ICMP error goes where the packets of its flow go.
#[inline(always)]
fn error_arrived<F: PacketFamily>(ctx: &TcContext) -> Option<i32> {
    let header: F::Header = ctx.load(ETHERNET).ok()?;
    let flow = quoted_flow::<F>(ctx, ETHERNET, &header)?;
    let side = Side::<F>::active()?;
    match forward::way(&side, &flow) {
        Way::Pass => None,
        Way::Here { second, .. } => {
            set_priority(ctx, forward::priority(second));
            None
        }
        Way::To { node, second, .. } => Some(onward_to(ctx, node, second)),
    }
}

/// The flow of a packet at an offset: of an ICMP error that of the packet which it is about.
#[inline(always)]
fn flow_of<F: PacketFamily>(ctx: &TcContext, offset: usize) -> Option<Flow> {
    let header: F::Header = ctx.load(offset).ok()?;
    match F::addresses(&header) {
        Some(addresses) => flow_at(ctx, offset + size_of::<F::Header>(), addresses),
        None => quoted_flow::<F>(ctx, offset, &header),
    }
}

/// The flow of the packet that an ICMP error at an offset is about.
#[inline(always)]
fn quoted_flow<F: PacketFamily>(ctx: &TcContext, offset: usize, header: &F::Header) -> Option<Flow> {
    /// The bytes before the packet.
    const ICMP_HEADER: usize = 8;
    let to = F::icmp(header)?;
    let message = offset + size_of::<F::Header>();
    if !F::is_error(ctx.load(message).ok()?) {
        return None;
    }
    let quoted: F::Header = ctx.load(message + ICMP_HEADER).ok()?;
    let (source, destination, protocol) = F::addresses(&quoted)?;
    let transport = message + ICMP_HEADER + size_of::<F::Header>();
    let [source_port, destination_port] = ctx.load::<[u16; 2]>(transport).ok()?.map(Be16::from_raw);
    // The packet was an answer.
    (source == to).then_some(Flow {
        source: destination.mapped(),
        destination: source.mapped(),
        source_port: destination_port,
        destination_port: source_port,
        protocol,
        continues: protocol == TCP,
    })
}

/// Takes the packet out of its wrapping, if a node has sent it and it is for a frontend that is forwarded. Answers probes; other
/// datagrams to the port pass.
#[inline(always)]
fn unwrap<F: PacketFamily>(ctx: &TcContext) -> Option<i32> {
    let side = Side::<F>::active()?;
    let wrapping = ctx.load(ETHERNET).ok();
    let Some((source, second)) = wrapping.and_then(|it: F::Wrapping| F::unwrap(&it)) else {
        return answer(ctx, &side);
    };
    let taken = || {
        let inner = ETHERNET + size_of::<F::Wrapping>();
        let flow = flow_of::<F>(ctx, inner)?;
        let forward = side.forward(flow.frontend())?;
        if side.number(source).is_none_or(|it| it == THIS_NODE) {
            counters::increment(forward.counters.forwarded + DROPPED);
            return None;
        }
        counters::packets(forward.counters.forwarded + RECEIVED, segments(ctx), ctx.len());
        let flags = u64::from(BPF_F_ADJ_ROOM_FIXED_GSO);
        ctx.adjust_room(-(size_of::<F::Wrapping>() as i32), BPF_ADJ_ROOM_MAC, flags).ok()?;
        Some(if flow.continues { side.number(second).unwrap_or(NO_NODE) } else { NO_NODE })
    };
    let Some(second) = taken() else { return Some(DROP) };
    set_priority(ctx, forward::priority(second));
    None
}

/// Returns a probe to the node that has sent it, if unwrapped packets are served here. One from the port of probes could go to and fro.
#[inline(always)]
fn answer<F: PacketFamily>(ctx: &TcContext, side: &Side<F>) -> Option<i32> {
    let header: F::Header = ctx.load(ETHERNET).ok()?;
    let (source, ..) = F::addresses(&header)?;
    let transport = ETHERNET + size_of::<F::Header>();
    let [from, to] = ctx.load::<[u16; 2]>(transport).ok()?;
    let probe: Probe = ctx.load(transport + UDP_HEADER).ok()?;
    if !probe.is_probe() || from == to || side.number(source).is_none() || !packet_path::serves() {
        return None;
    }
    let [here, there] = ctx.load::<[[u8; 6]; 2]>(0).ok()?;
    // Every checksum stays right.
    ctx.store(0, &[there, here], 0).ok()?;
    ctx.store(ETHERNET, &F::returned(header), 0).ok()?;
    ctx.store(transport, &[to, from], 0).ok()?;
    // SAFETY: the call takes no pointers.
    Some(unsafe { bpf_redirect(interface(ctx), 0) } as i32)
}

#[inline(always)]
fn too_big<F: PacketFamily>(ctx: &TcContext) -> Option<i32> {
    Some(answer_too_big::<F>(ctx).unwrap_or(DROP))
}

#[inline(always)]
fn answer_too_big<F: PacketFamily>(ctx: &TcContext) -> Option<i32> {
    let client: F = ctx.load(ETHERNET + F::SOURCE).ok()?;
    let node = Side::<F>::active()?.node(THIS_NODE)?;
    let mtu = scratch(ctx).wrapping_sub(size_of::<F::Wrapping>() as u32);
    let quoted: F::Quoted = ctx.load(ETHERNET).ok()?;
    let [here, there] = ctx.load::<[[u8; 6]; 2]>(0).ok()?;
    let message = F::too_big(node, client, mtu, &quoted);
    // SAFETY: the context is valid.
    let cut = unsafe { bpf_skb_change_tail(ctx.skb.skb, (ETHERNET + size_of::<F::Quoted>()) as u32, 0) };
    if cut != 0 {
        return None;
    }
    ctx.adjust_room(size_of::<F::TooBig>() as i32, BPF_ADJ_ROOM_MAC, 0).ok()?;
    ctx.store(0, &[there, here], 0).ok()?;
    ctx.store(ETHERNET, &message, 0).ok()?;
    // SAFETY: the call takes no pointers.
    Some(unsafe { bpf_redirect(interface(ctx), 0) } as i32)
}

/// Gives a packet to the second, whose number is in its priority. What was translated goes on, without that priority: IPv6 has not
/// replaced it.
#[inline(always)]
fn returned<F: PacketFamily>(ctx: &TcContext) -> Option<i32> {
    let (second, is_owner) = forward::second_of(priority(ctx));
    set_priority(ctx, 0);
    let flow = flow_of::<F>(ctx, ETHERNET)?;
    let side = Side::<F>::active()?;
    let forward = side.forward(flow.frontend())?;
    // The packet path does not know the frontend yet. A router would send the packet here again.
    if second == NO_SECOND {
        counters::increment(forward.counters.forwarded + DROPPED);
        return Some(DROP);
    }
    counters::increment(forward.counters.forwarded + SECOND_CHANCES);
    let after = if is_owner { forward::second_after(&side, &forward, &flow, second) } else { NO_NODE };
    Some(onward_to(ctx, second, after))
}

/// Leaves to [`onward`] to which node a packet goes, and its second.
#[inline(always)]
fn onward_to(ctx: &TcContext, node: NodeNumber, second: NodeNumber) -> i32 {
    set_scratch(ctx, u32::from(second) << 16 | u32::from(node));
    ONWARD
}

#[inline(always)]
fn onward<F: PacketFamily>(ctx: &TcContext) -> Option<i32> {
    let numbers = scratch(ctx);
    let flow = flow_of::<F>(ctx, ETHERNET)?;
    let side = Side::<F>::active()?;
    let counters = side.forward(flow.frontend())?.counters;
    let Some(node) = side.node(numbers as NodeNumber) else { return Some(DROP) };
    let second = side.node((numbers >> 16) as NodeNumber).unwrap_or_default();
    Some(send(ctx, &side, &flow, counters, [node, second]))
}

#[inline(always)]
fn leaves<F: PacketFamily>(ctx: &TcContext) -> Option<i32> {
    // Nearly every packet is in the middle of a TCP connection: two bytes tell, where they are.
    let flags = byte(ctx, ETHERNET + size_of::<F::Header>() + TCP_FLAGS);
    if byte(ctx, ETHERNET + F::PROTOCOL) == Some(TCP) && flags.is_some_and(|it| it & (SYN | ACK) != SYN | ACK)
    {
        return None;
    }
    let header: F::Header = ctx.load(ETHERNET).ok()?;
    let transport = ETHERNET + size_of::<F::Header>();
    match F::addresses(&header)? {
        (frontend, _, TCP) => answered(ctx, transport, frontend),
        (_, destination, _) => datagram(ctx, transport, destination),
    }
}

/// Drops a datagram to another node's port of wrapped packets that is no probe. The address of a node is all that a wrapped packet
/// is known by there, and neither pods, whose packets may be masqueraded, nor programs of the node may use it.
#[inline(always)]
fn datagram<F: PacketFamily>(ctx: &TcContext, transport: usize, destination: F) -> Option<i32> {
    let [port, length] = ctx.load::<[u16; 2]>(transport + 2).ok()?;
    let is_probe = usize::from(u16::from_be(length)) == UDP_HEADER + size_of::<Probe>();
    if port != FORWARDING_PORT.load() as u16 || is_probe {
        return None;
    }
    Side::<F>::active()?.number(destination).map(|_| DROP)
}

/// Reduces the maximum segment size that an answer to a SYN allows, so that the client's packets fit into a wrapping.
#[inline(always)]
fn answered<F: PacketFamily>(ctx: &TcContext, transport: usize, frontend: F) -> Option<i32> {
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

#[inline(always)]
fn send<F: PacketFamily>(
    ctx: &TcContext,
    side: &Side<F>,
    flow: &Flow,
    counters: ForwardCounters,
    [node, second]: [F; 2],
) -> i32 {
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
        if !is_large(ctx) {
            let mut mtu = 0;
            let longer = size_of::<F::Wrapping>() as i32;
            // SAFETY: as in `answered`.
            let fits = unsafe { bpf_check_mtu(ctx.as_ptr(), lookup.ifindex, &raw mut mtu, longer, 0) };
            if fits == FRAGMENTATION_NEEDED {
                counters::increment(counters.forwarded + DROPPED);
                set_scratch(ctx, mtu);
                return Some(TOO_BIG);
            }
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
        let make_room = |encapsulation: u32| {
            let flags = u64::from(BPF_F_ADJ_ROOM_FIXED_GSO | encapsulation);
            ctx.adjust_room(size_of::<F::Wrapping>() as i32, BPF_ADJ_ROOM_MAC, flags).ok()
        };
        // What splits a large packet must know of the wrapping. The kernel wraps no packet that it knows as wrapped, nor does it
        // forget that when the wrapping is removed, and what it knows is right again then. A small one is not said to be wrapped.
        let is_known = is_large(ctx) && make_room(BPF_F_ADJ_ROOM_ENCAP_L4_UDP | F::ENCAPSULATION).is_some();
        if !is_known {
            make_room(0)?;
        }
        ctx.store(ETHERNET, &wrapping, 0).ok()?;
        set_priority(ctx, WRAPPED);
        let mut hop = F::next_hop(&lookup);
        // SAFETY: as above.
        let verdict = unsafe {
            bpf_redirect_neigh(lookup.ifindex, &raw mut hop, size_of::<bpf_redir_neigh>() as i32, 0)
        };
        Some(verdict as i32)
    };
    sent().unwrap_or(DROP)
}

/// What `bpf_check_mtu` returns of a packet that would have to be fragmented.
const FRAGMENTATION_NEEDED: i64 = 1;
/// What `bpf_fib_lookup` returns instead of [`FOUND`] while the address of its interface is not known yet.
const NO_NEIGHBOR: i64 = 7;

#[inline(always)]
fn flow_at<F: PacketFamily>(ctx: &TcContext, transport: usize, addresses: (F, F, u8)) -> Option<Flow> {
    flow(addresses, ctx.load(transport).ok()?, || ctx.load(transport + TCP_FLAGS).ok())
}
