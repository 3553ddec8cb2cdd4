//! Which addresses have just sent to a socket, so that replies are told from datagrams to a Service.
//!
//! Invariant: what is no frontend costs no look-up beyond the prefilter's.

use aya_ebpf::{bindings::bpf_sock_addr, programs::SockAddrContext};
use proxy_common::{
    decide::may_be_hijacked,
    net::{Be16, SockAddr, V4, V6},
    senders::{REFRESH_TIME, REPLY_TIME, SenderKey},
};

use crate::{
    ctx,
    maps::SENDERS,
    side::{FamilyTables, Side},
};

#[inline(always)]
pub(crate) fn on_received(ctx: &SockAddrContext, sender: &SockAddr) {
    let is_kept = match V4::from_mapped(sender.ip) {
        Some(ip) => is_kept::<V4>(ctx, ip, sender),
        None => is_kept::<V6>(ctx, sender.ip, sender),
    };
    if !is_kept {
        return;
    }
    let key = SenderKey::new(*sender, ctx::netns(ctx), ctx::local_port(ctx) as u16);
    let now = ctx::now();
    match SENDERS.get_ptr_mut(&key) {
        // SAFETY: the entry may be reused for another sender meanwhile, which is just as recent.
        Some(time) => unsafe { time.write_volatile(now) },
        None => _ = SENDERS.insert(&key, &now, 0),
    }
}

/// Whether this socket, or another one at its port, has just received a datagram from this address.
#[inline(always)]
pub(crate) fn has_just_heard(ctx: &SockAddrContext, sender: &SockAddr) -> bool {
    let [a, b, c, d] = sender.ip.raw().map(u64::from);
    let ports = u64::from(ctx::local_port(ctx)) << 16 | u64::from(sender.port.raw());
    just_heard(ctx.sock_addr, a << 32 | b, c << 32 | d, ports) != 0
}

/// [`has_just_heard`], with the socket's own port above the sender's. It is not inlined: the verifier checks it once, as
/// `side::choose4`; and it has no more arguments than registers outlast calls, since the programs leave little room on the stack.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn just_heard(ctx: *mut bpf_sock_addr, high: u64, low: u64, ports: u64) -> u64 {
    let ctx = &SockAddrContext::new(ctx);
    let ip = V6::from_raw([(high >> 32) as u32, high as u32, (low >> 32) as u32, low as u32]);
    let sender = SockAddr::new(ip, Be16::from_raw(ports as u16));
    let key = SenderKey::new(sender, ctx::netns(ctx), (ports >> 16) as u16);
    let Some(time) = SENDERS.get_ptr_mut(&key) else { return 0 };
    // SAFETY: an entry that is reused meanwhile is copied out at once, and is recent.
    let age = ctx::now().wrapping_sub(unsafe { time.read_volatile() });
    if age >= REPLY_TIME {
        return 0;
    }
    if age >= REFRESH_TIME {
        // SAFETY: as above; the other sender is just as recent.
        unsafe { time.write_volatile(ctx::now()) };
    }
    1
}

#[inline(always)]
fn is_kept<F: FamilyTables>(ctx: &SockAddrContext, ip: F, sender: &SockAddr) -> bool {
    Side::<F>::active().is_some_and(|it| may_be_hijacked(&it, ip, sender.port, || ctx::is_in_host_netns(ctx)))
}
