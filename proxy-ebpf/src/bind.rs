//! bind4, bind6: on the node itself, a node port is taken.
//!
//! Its connections would go to the Service, and never reach the program. Only a port that is asked for is refused: the
//! kernel's own choice for `bind(0)` never comes here with a number.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use proxy_common::{
    decide::bound,
    net::{V4, V6},
    tables::Frontend,
};

use crate::{
    PASS, counters, ctx,
    maps::{Side, protects_node_ports},
};

/// IPv4.
#[cgroup_sock_addr(bind4)]
pub(crate) fn bind4(ctx: SockAddrContext) -> i32 {
    try_bind(&ctx, node_port4).unwrap_or(PASS)
}

/// IPv6 and v4-mapped.
#[cgroup_sock_addr(bind6)]
pub(crate) fn bind6(ctx: SockAddrContext) -> i32 {
    try_bind(&ctx, node_port6).unwrap_or(PASS)
}

#[inline(always)]
fn try_bind(ctx: &SockAddrContext, node_port: impl Fn(&SockAddrContext) -> Option<Frontend>) -> Option<i32> {
    if !protects_node_ports() {
        return Some(PASS);
    }
    let node_port = node_port(ctx)?;
    if !ctx::is_host(ctx) {
        return Some(PASS);
    }
    counters::rejection(node_port.cell);
    Some(ctx::refuse_bind())
}

#[inline(always)]
fn node_port4(ctx: &SockAddrContext) -> Option<Frontend> {
    bound(&Side::<V4>::active()?, ctx::ip4(ctx), ctx::port(ctx), ctx::protocol(ctx))
}

#[inline(always)]
fn node_port6(ctx: &SockAddrContext) -> Option<Frontend> {
    let (ip, port, protocol) = (ctx::ip6(ctx), ctx::port(ctx), ctx::protocol(ctx));
    let side = Side::<V6>::active()?;
    if let Some(ip) = ip.to_v4() {
        return bound(&side.of_family::<V4>(), ip, port, protocol);
    }
    let found = bound(&side, ip, port, protocol);
    if found.is_none() && ip == V6::default() {
        // Such a socket often serves IPv4 as well.
        return bound(&side.of_family::<V4>(), V4::default(), port, protocol);
    }
    found
}
