//! bind4, bind6: on the node itself, a node port is taken.
//!
//! Its connections would go to the Service, and never reach the program. Only a port that is asked for is refused: the
//! kernel's own choice for `bind(0)` never comes here with a number.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use proxy_common::net::V4;

use crate::{
    PASS, counters, ctx,
    maps::{Side, protects_node_ports},
};

/// IPv4.
#[cgroup_sock_addr(bind4)]
pub(crate) fn bind4(ctx: SockAddrContext) -> i32 {
    try_bind(&ctx).unwrap_or(PASS)
}

/// IPv6; such a socket often serves IPv4 as well.
#[cgroup_sock_addr(bind6)]
pub(crate) fn bind6(ctx: SockAddrContext) -> i32 {
    try_bind(&ctx).unwrap_or(PASS)
}

#[inline(always)]
fn try_bind(ctx: &SockAddrContext) -> Option<i32> {
    if !protects_node_ports() {
        return Some(PASS);
    }
    let side = Side::<V4>::active()?;
    let node_port = side.any_node_port(ctx::port(ctx), ctx::protocol(ctx))?;
    if !ctx::is_host(ctx) {
        return Some(PASS);
    }
    counters::rejection(node_port.cell);
    Some(ctx::refuse_bind())
}
