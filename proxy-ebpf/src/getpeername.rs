//! getpeername4, getpeername6: a connected socket shows the address that its program connected to.
//!
//! These hooks must return [`PASS`]; the kernel accepts nothing else.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use proxy_common::socket::Address;

use crate::{PASS, ctx, memory};

/// Peers of v4 sockets.
#[cgroup_sock_addr(getpeername4)]
pub(crate) fn getpeername4(ctx: SockAddrContext) -> i32 {
    let peer = Address::new(ctx::ip4(&ctx).mapped(), ctx::port(&ctx));
    if let Some(service) = service_behind(&ctx, &peer)
        && let Some(ip) = service.ip.to_v4()
    {
        ctx::rewrite4(&ctx, ip, service.port);
    }
    PASS
}

/// Peers of v6 sockets, v4-mapped ones included.
#[cgroup_sock_addr(getpeername6)]
pub(crate) fn getpeername6(ctx: SockAddrContext) -> i32 {
    let peer = Address::new(ctx::ip6(&ctx), ctx::port(&ctx));
    if let Some(service) = service_behind(&ctx, &peer) {
        ctx::rewrite6(&ctx, service.ip, service.port);
    }
    PASS
}

/// The Service address that led this socket to `peer`.
#[inline(always)]
fn service_behind(ctx: &SockAddrContext, peer: &Address) -> Option<Address> {
    let translation = memory::recall(ctx)?;
    (!translation.backend.is_unset() && translation.backend == *peer).then_some(translation.service)
}
