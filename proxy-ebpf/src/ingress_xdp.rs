//! ingress_xdp: forwards packets from outside in the driver, as far as they need no more than a wrapping.
//!
//! Invariant: it decides as [`ingress`](crate::ingress) does. What it does not forward passes unchanged to that program.

use core::mem::MaybeUninit;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{
        bpf_fib_lookup as FibLookup,
        xdp_action::{XDP_DROP, XDP_PASS, XDP_TX},
        xdp_md,
    },
    helpers::generated::{
        bpf_check_mtu, bpf_fib_lookup, bpf_redirect, bpf_xdp_adjust_head, bpf_xdp_load_bytes,
        bpf_xdp_store_bytes,
    },
    macros::xdp,
    programs::XdpContext,
};
use proxy_common::{
    counters::SENT,
    forward::{self, ETH_P_IP, ETH_P_IPV6, THIS_NODE, Way, Wrap},
    net::{Be16, V4, V6},
};

use crate::{
    config::FORWARDING_PORT,
    counters,
    packet_family::{ETHERNET, FOUND, PacketFamily, TCP_FLAGS, flow},
    side::Side,
};

/// Where the EtherType is.
const ETHERTYPE: usize = 12;

#[xdp]
pub(crate) fn ingress_xdp(ctx: XdpContext) -> u32 {
    match load(&ctx, ETHERTYPE).map(|it| Be16::from_raw(it).get()) {
        Some(ETH_P_IP) => forwarded4(ctx.ctx),
        Some(ETH_P_IPV6) => forwarded6(ctx.ctx),
        _ => XDP_PASS,
    }
}

#[inline(never)]
fn forwarded4(ctx: *mut xdp_md) -> u32 {
    forwarded::<V4>(&XdpContext::new(ctx)).unwrap_or(XDP_PASS)
}

#[inline(never)]
fn forwarded6(ctx: *mut xdp_md) -> u32 {
    forwarded::<V6>(&XdpContext::new(ctx)).unwrap_or(XDP_PASS)
}

#[inline(always)]
fn forwarded<F: PacketFamily>(ctx: &XdpContext) -> Option<u32> {
    let header: F::Header = load(ctx, ETHERNET)?;
    let addresses = F::addresses(&header)?;
    let side = Side::<F>::active()?;
    if !addresses.1.may_be_frontend(proxy_common::decide::Tables::prefilter(&side)?) {
        return None;
    }
    let transport = ETHERNET + size_of::<F::Header>();
    let flow = flow(addresses, load(ctx, transport)?, || load(ctx, transport + TCP_FLAGS))?;
    let Way::To { counters, node, second } = forward::way(&side, &flow) else { return None };
    let (source, destination) = (side.node(THIS_NODE)?, side.node(node)?);
    let second = side.node(second).unwrap_or_default();
    let mut lookup = F::route(source, destination);
    let interface = ctx.ingress_ifindex() as u32;
    lookup.ifindex = interface;
    // SAFETY: the structure is of the size that is passed.
    let found = unsafe { bpf_fib_lookup(ctx.as_ptr(), &raw mut lookup, size_of::<FibLookup>() as i32, 0) };
    let (longer, mut mtu) = (size_of::<F::Wrapping>() as i32, 0);
    // SAFETY: the kernel writes one integer, which outlives the call.
    let fits = unsafe { bpf_check_mtu(ctx.as_ptr(), lookup.ifindex, &raw mut mtu, longer, 0) };
    if found != FOUND || fits != 0 {
        return None;
    }
    let length = (ctx.data_end() - ctx.data()) as u32;
    let wrapping = F::wrap(Wrap {
        source,
        destination,
        second,
        length: length.wrapping_sub(ETHERNET as u32),
        hash: flow.hash(false),
        port: Be16::from_raw(FORWARDING_PORT.load() as u16),
    });
    // SAFETY: the context is valid.
    if unsafe { bpf_xdp_adjust_head(ctx.ctx, -longer) } != 0 {
        return None;
    }
    counters::packets(counters.arrived + SENT, 1, length);
    // From here on the packet is another one.
    let wrapped = store(ctx, 0, &[lookup.dmac, lookup.smac])
        .and_then(|()| store(ctx, ETHERTYPE, &F::ETHERTYPE.raw()))
        .and_then(|()| store(ctx, ETHERNET, &wrapping));
    Some(match wrapped {
        None => XDP_DROP,
        Some(()) if lookup.ifindex == interface => XDP_TX,
        // SAFETY: the call takes no pointers.
        Some(()) => unsafe { bpf_redirect(lookup.ifindex, 0) as u32 },
    })
}

#[inline(always)]
fn load<T: Copy>(ctx: &XdpContext, offset: usize) -> Option<T> {
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: the kernel writes the whole value if it succeeds, and every type that is loaded consists of integers.
    unsafe {
        let result =
            bpf_xdp_load_bytes(ctx.ctx, offset as u32, value.as_mut_ptr().cast(), size_of::<T>() as u32);
        (result == 0).then(|| value.assume_init())
    }
}

#[inline(always)]
fn store<T>(ctx: &XdpContext, offset: usize, value: &T) -> Option<()> {
    // SAFETY: the kernel reads the value, which outlives the call, and consists of integers without padding.
    let result = unsafe {
        bpf_xdp_store_bytes(
            ctx.ctx,
            offset as u32,
            (&raw const *value).cast_mut().cast(),
            size_of::<T>() as u32,
        )
    };
    (result == 0).then_some(())
}
