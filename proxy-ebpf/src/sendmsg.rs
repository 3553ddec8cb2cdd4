//! sendmsg4, sendmsg6: a datagram of an unconnected socket to a Service goes to one of its backends, and to the same
//! one as before while that is still in the Service's set.
//!
//! The hooks also run for `sendto(address)` on a connected socket: that goes to the connected backend, or the kernel
//! would filter the reply out. Where the socket was connected before these hooks were there, that is nobody's.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use proxy_common::{
    decide::{Tables as _, Verdict, decide},
    net::{V4, V6},
    socket::{Address, Translation},
};

use crate::{PASS, canary, counters, ctx, datagrams, maps::Side, memory, process::Process, scope};

/// IPv4, and v4-mapped destinations of v6 sockets.
#[cgroup_sock_addr(sendmsg4)]
pub(crate) fn sendmsg4(ctx: SockAddrContext) -> i32 {
    try_sendmsg4(&ctx).unwrap_or(PASS)
}

/// IPv6.
#[cgroup_sock_addr(sendmsg6)]
pub(crate) fn sendmsg6(ctx: SockAddrContext) -> i32 {
    try_sendmsg6(&ctx).unwrap_or(PASS)
}

#[inline(always)]
fn try_sendmsg4(ctx: &SockAddrContext) -> Option<i32> {
    let (ip, port, protocol) = (ctx::ip4(ctx), ctx::port(ctx), ctx::protocol(ctx));
    let service = Address::new(ip.mapped(), port);
    if ctx::is_connected(ctx) {
        if let Some(backend) = connected_backend(ctx, &service) {
            ctx::rewrite4(ctx, backend.ip.to_v4()?, backend.port);
            return Some(PASS);
        }
        if ctx::is_peer(ctx, &service) {
            return Some(PASS);
        }
    }
    let backend = datagrams::backend_of(ctx, &service);
    let side = Side::<V4>::active()?;
    let remembered = side.backend_at(backend);
    let verdict = match scope::is_left_alone(ctx) {
        true => Verdict::Pass,
        false => decide(&side, &Process::that_sends(ctx), ip, port, protocol, remembered),
    };
    match canary::lead4(verdict, ip, port, protocol) {
        Verdict::Pass => {
            datagrams::forget(ctx, &service);
            Some(PASS)
        }
        Verdict::Refuse { port } => {
            counters::refusal(port);
            Some(ctx::refuse())
        }
        Verdict::To(led) => {
            let backend = led.backend;
            let translation = Translation { service, backend: side.address_of(backend) };
            if !datagrams::remember(ctx, translation) {
                counters::rejection(led.port);
                return Some(ctx::no_memory());
            }
            counters::connection(&led);
            ctx::rewrite4(ctx, backend.address, backend.port);
            Some(PASS)
        }
    }
}

#[inline(always)]
fn try_sendmsg6(ctx: &SockAddrContext) -> Option<i32> {
    let (ip, port, protocol) = (ctx::ip6(ctx), ctx::port(ctx), ctx::protocol(ctx));
    let service = Address::new(ip, port);
    if ctx::is_connected(ctx) {
        if let Some(backend) = connected_backend(ctx, &service) {
            ctx::rewrite6(ctx, backend.ip, backend.port);
            return Some(PASS);
        }
        if ctx::is_peer(ctx, &service) {
            return Some(PASS);
        }
    }
    let backend = datagrams::backend_of(ctx, &service);
    let side = Side::<V6>::active()?;
    let remembered = side.backend_at(backend);
    let verdict = match scope::is_left_alone(ctx) {
        true => Verdict::Pass,
        false => decide(&side, &Process::that_sends(ctx), ip, port, protocol, remembered),
    };
    match canary::lead6(verdict, ip, port, protocol) {
        Verdict::Pass => {
            datagrams::forget(ctx, &service);
            Some(PASS)
        }
        Verdict::Refuse { port } => {
            counters::refusal(port);
            Some(ctx::refuse())
        }
        Verdict::To(led) => {
            let backend = led.backend;
            let translation = Translation { service, backend: side.address_of(backend) };
            if !datagrams::remember(ctx, translation) {
                counters::rejection(led.port);
                return Some(ctx::no_memory());
            }
            counters::connection(&led);
            ctx::rewrite6(ctx, backend.address, backend.port);
            Some(PASS)
        }
    }
}

/// Where a connected socket's datagrams to the Service it is connected to go. Where it goes itself is asked, for it may have
/// been connected elsewhere by a call that failed.
#[inline(always)]
fn connected_backend(ctx: &SockAddrContext, service: &Address) -> Option<Address> {
    let translation = memory::recall(ctx)?;
    (translation.service == *service && ctx::is_peer(ctx, &translation.backend))
        .then_some(translation.backend)
}
