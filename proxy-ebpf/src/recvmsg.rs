//! recvmsg4, recvmsg6: a reply from a backend shows the Service's address as its source.
//!
//! Nothing but the socket's own memory is asked: a reply in flight keeps its source whatever became of the Service.
//! These hooks must return [`PASS`]; the kernel accepts nothing else.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use proxy_common::socket::Address;

use crate::{PASS, ctx, datagrams, memory};

/// Replies to v4 sockets.
#[cgroup_sock_addr(recvmsg4)]
pub(crate) fn recvmsg4(ctx: SockAddrContext) -> i32 {
    let from = Address::new(ctx::ip4(&ctx).mapped(), ctx::port(&ctx));
    let service = service_of(&ctx, &from);
    if !service.is_unset()
        && let Some(ip) = service.ip.to_v4()
    {
        ctx::rewrite4(&ctx, ip, service.port);
    }
    PASS
}

/// Replies to v6 sockets, v4-mapped ones included.
#[cgroup_sock_addr(recvmsg6)]
pub(crate) fn recvmsg6(ctx: SockAddrContext) -> i32 {
    let from = Address::new(ctx::ip6(&ctx), ctx::port(&ctx));
    let service = service_of(&ctx, &from);
    if !service.is_unset() {
        ctx::rewrite6(&ctx, service.ip, service.port);
    }
    PASS
}

/// The Service that this socket was asking when `backend` answers; unset if none.
#[inline(always)]
fn service_of(ctx: &SockAddrContext, backend: &Address) -> Address {
    if ctx::is_connected(ctx)
        && let Some(translation) = memory::recall(ctx)
        && translation.backend == *backend
    {
        return translation.service;
    }
    datagrams::service_of(ctx, backend)
}
