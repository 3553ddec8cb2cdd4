//! Fields of socket buffers.

use aya_ebpf::programs::TcContext;
use proxy_common::net::Be16;

use crate::ctx::{read, set};

/// The EtherType.
#[inline(always)]
pub(crate) fn protocol(ctx: &TcContext) -> Be16 {
    Be16::from_raw(read!(ctx.skb.skb, protocol) as u16)
}

/// What scheduling, and others, know the packet by.
#[inline(always)]
pub(crate) fn priority(ctx: &TcContext) -> u32 {
    read!(ctx.skb.skb, priority)
}

#[inline(always)]
pub(crate) fn set_priority(ctx: &TcContext, priority: u32) {
    set!(ctx.skb.skb, priority, priority);
}

/// The interface that the packet arrived at, or leaves by.
#[inline(always)]
pub(crate) fn interface(ctx: &TcContext) -> u32 {
    read!(ctx.skb.skb, ifindex)
}

/// The interface that a packet that leaves has arrived at; 0 if it begins here.
#[inline(always)]
pub(crate) fn arrival_interface(ctx: &TcContext) -> u32 {
    read!(ctx.skb.skb, ingress_ifindex)
}

/// Whether the packet is several segments in one.
#[inline(always)]
pub(crate) fn is_large(ctx: &TcContext) -> bool {
    read!(ctx.skb.skb, gso_size) != 0
}

/// How many packets it is, before they were joined or after they will be split.
#[inline(always)]
pub(crate) fn segments(ctx: &TcContext) -> u32 {
    let segments = read!(ctx.skb.skb, gso_segs);
    if segments == 0 { 1 } else { segments }
}

/// A byte of the packet, `None` if it is not in the part that the kernel has in one piece.
#[inline(always)]
pub(crate) fn byte(ctx: &TcContext, offset: usize) -> Option<u8> {
    let at = ctx.data() + offset;
    // SAFETY: the byte lies before the end, as the verifier checks, too.
    (at < ctx.data_end()).then(|| unsafe { *(at as *const u8) })
}

/// A word that programs may use while they have the packet.
#[inline(always)]
pub(crate) fn scratch(ctx: &TcContext) -> u32 {
    read!(ctx.skb.skb, cb[0])
}

#[inline(always)]
pub(crate) fn set_scratch(ctx: &TcContext, word: u32) {
    set!(ctx.skb.skb, word, cb[0]);
}
