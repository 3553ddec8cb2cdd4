//! trace_ingress: reports the first packet of each connection, and each datagram, that `ingress` sends on to another node.
//!
//! Attached before that program while a trace runs. Invariant: every packet goes on unchanged.

use core::mem::MaybeUninit;

use aya_ebpf::{
    bindings::{__sk_buff, BPF_RB_NO_WAKEUP, TC_ACT_UNSPEC},
    btf_maps::{Array, HashMap, RingBuf},
    macros::{btf_map, classifier},
    programs::TcContext,
};
use proxy_common::{
    decide::Tables as _,
    forward::{self, ETH_P_IP, ETH_P_IPV6, ForwardTables as _},
    net::{V4, V6},
    tables::FrontendKey6,
    trace::{MAX_FRONTENDS, SENT_BYTES, SentPacket},
};

use crate::{
    atomic,
    packet_family::{ETHERNET, PacketFamily, TCP_FLAGS, flow},
    side::Side,
    skb::{interface, protocol},
};

#[btf_map]
static SENT_PACKETS: RingBuf<SentPacket, SENT_BYTES> = RingBuf::new();
/// The frontends whose packets are reported.
#[btf_map]
static TRACED_FRONTENDS: HashMap<FrontendKey6, u32, { MAX_FRONTENDS as usize }> = HashMap::new();
/// How many packets found no room.
#[btf_map]
static LOST_PACKETS: Array<u64, 1> = Array::new();

#[classifier]
pub(crate) fn trace_ingress(ctx: TcContext) -> i32 {
    match protocol(&ctx).get() {
        ETH_P_IP => report4(ctx.skb.skb),
        ETH_P_IPV6 => report6(ctx.skb.skb),
        _ => 0,
    };
    TC_ACT_UNSPEC
}

#[inline(never)]
fn report4(skb: *mut __sk_buff) -> u32 {
    report::<V4>(&TcContext::new(skb)).is_some().into()
}

#[inline(never)]
fn report6(skb: *mut __sk_buff) -> u32 {
    report::<V6>(&TcContext::new(skb)).is_some().into()
}

#[inline(always)]
fn report<F: PacketFamily>(ctx: &TcContext) -> Option<()> {
    let header: F::Header = ctx.load(ETHERNET).ok()?;
    let addresses = F::addresses(&header)?;
    let side = Side::<F>::active()?;
    if !addresses.1.may_be_frontend(side.prefilter()?) {
        return None;
    }
    let transport = ETHERNET + size_of::<F::Header>();
    let flow = flow(addresses, ctx.load(transport).ok()?, || ctx.load(transport + TCP_FLAGS).ok())?;
    if flow.continues || TRACED_FRONTENDS.get_ptr(flow.frontend()).is_none() {
        return None;
    }
    let node = forward::way(&side, &flow).onward()?;
    let forward = side.forward(flow.frontend())?;
    let Some(mut entry) = SENT_PACKETS.reserve(0) else {
        if let Some(lost) = LOST_PACKETS.get_ptr_mut(0) {
            atomic::add(lost, 1);
        }
        return None;
    };
    let packet = MaybeUninit::as_mut_ptr(&mut entry);
    // SAFETY: the verifier checks that there is room for one.
    unsafe {
        (*packet).source = flow.source;
        (*packet).destination = flow.destination;
        (*packet).node = side.node(node).unwrap_or_default().mapped();
        (*packet).source_port = flow.source_port;
        (*packet).destination_port = flow.destination_port;
        (*packet).interface = interface(ctx);
        (*packet).row = flow.hash(forward.is_by_client()) & forward.mask;
        (*packet).mask = forward.mask;
        (*packet).protocol = flow.protocol.into();
    }
    entry.submit(BPF_RB_NO_WAKEUP.into());
    Some(())
}
