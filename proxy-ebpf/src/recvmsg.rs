//! recvmsg4, recvmsg6: a reply from a backend shows the Service's address as its source.
//!
//! Nothing but the socket's own memory is asked: a reply in flight keeps its source whatever became of the Service.
//! These hooks must return [`PASS`]; the kernel accepts nothing else.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use proxy_common::socket::Address;

use crate::{PASS, ctx, memory};

/// Replies to v4 sockets.
#[cgroup_sock_addr(recvmsg4)]
pub(crate) fn recvmsg4(ctx: SockAddrContext) -> i32 {
    let from = Address::new(ctx::ip4(&ctx).mapped(), ctx::port(&ctx));
    if let Some(service) = service_of(&ctx, &from)
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
    if let Some(service) = service_of(&ctx, &from) {
        ctx::rewrite6(&ctx, service.ip, service.port);
    }
    PASS
}

/// The Service that this socket was asking when `backend` answers.
#[inline(always)]
fn service_of(ctx: &SockAddrContext, backend: &Address) -> Option<Address> {
    if ctx::is_connected(ctx)
        && let Some(translation) = memory::recall(ctx)
        && translation.backend == *backend
    {
        return Some(translation.service);
    }
    ctx::datagrams(ctx)?.service_of(backend)
}
