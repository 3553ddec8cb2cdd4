//! bind4, bind6: refuses to bind a node port on the node.
//!
//! Its connections would go to the Service, and never reach the program. Only a port that is asked for is refused: for
//! `bind(0)`, the port that the kernel selects is not in the context.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use proxy_common::{
    counters::DENIED,
    decide::node_port_conflict,
    net::{V4, V6},
    tables::Frontend,
};

use crate::{
    config::PROTECT_NODE_PORTS,
    counters,
    ctx::{self, EADDRINUSE, HookFamily as _, PASS},
    side::Side,
};

#[cgroup_sock_addr(bind4)]
#[inline(always)]
pub(crate) fn bind4(ctx: SockAddrContext) -> i32 {
    try_bind(&ctx, node_port4).unwrap_or(PASS)
}

/// IPv6 and v4-mapped.
#[cgroup_sock_addr(bind6)]
#[inline(always)]
pub(crate) fn bind6(ctx: SockAddrContext) -> i32 {
    try_bind(&ctx, node_port6).unwrap_or(PASS)
}

#[inline(always)]
fn try_bind(ctx: &SockAddrContext, node_port: impl Fn(&SockAddrContext) -> Option<Frontend>) -> Option<i32> {
    if PROTECT_NODE_PORTS.load() == 0 {
        return Some(PASS);
    }
    let node_port = node_port(ctx)?;
    if !ctx::is_in_host_netns(ctx) {
        return Some(PASS);
    }
    counters::increment(node_port.counter + DENIED);
    Some(ctx::fail(EADDRINUSE))
}

#[inline(always)]
fn node_port4(ctx: &SockAddrContext) -> Option<Frontend> {
    node_port_conflict(&Side::<V4>::active()?, V4::address(ctx), ctx::port(ctx), ctx::protocol(ctx))
}

#[inline(always)]
fn node_port6(ctx: &SockAddrContext) -> Option<Frontend> {
    let (ip, port, protocol) = (V6::address(ctx), ctx::port(ctx), ctx::protocol(ctx));
    let side = Side::<V6>::active()?;
    if let Some(ip) = V4::from_mapped(ip) {
        return node_port_conflict(&side.of_family::<V4>(), ip, port, protocol);
    }
    let found = node_port_conflict(&side, ip, port, protocol);
    if found.is_none() && ip == V6::default() {
        // Such a socket often accepts IPv4 as well.
        return node_port_conflict(&side.of_family::<V4>(), V4::default(), port, protocol);
    }
    found
}
