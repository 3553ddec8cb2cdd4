//! recvmsg4, recvmsg6: rewrites the source of a backend's reply to the address of the Service.
//!
//! Only the socket's own translations are used: a reply in flight keeps its source whatever happened to the Service.
//! Any other sender may be a client, to whom this socket replies ([`senders`]).
//! These hooks must return [`PASS`]; the kernel accepts nothing else.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use proxy_common::net::{SockAddr, V4, V6};

use crate::{
    ctx::{self, HookFamily, PASS},
    senders,
    slot::SlotRef,
    sock_nat, udp_nat,
};

#[cgroup_sock_addr(recvmsg4)]
#[inline(always)]
pub(crate) fn recvmsg4(ctx: SockAddrContext) -> i32 {
    rewrite_source::<V4>(&ctx)
}

/// Replies to v6 sockets, v4-mapped ones included.
#[cgroup_sock_addr(recvmsg6)]
#[inline(always)]
pub(crate) fn recvmsg6(ctx: SockAddrContext) -> i32 {
    rewrite_source::<V6>(&ctx)
}

#[inline(always)]
fn rewrite_source<F: HookFamily>(ctx: &SockAddrContext) -> i32 {
    let sender = ctx::sock_addr::<F>(ctx);
    let service = service_of(ctx, &sender);
    if !service.is_unset() {
        let _ = ctx::rewrite::<F>(ctx, &service);
    } else if !ctx::is_connected(ctx) {
        senders::on_received(ctx, &sender);
    }
    PASS
}

/// The Service address that a reply from `backend` to this socket belongs to; unset if none.
#[inline(always)]
fn service_of(ctx: &SockAddrContext, backend: &SockAddr) -> SockAddr {
    let Some(slot) = SlotRef::of(ctx) else { return SockAddr::UNSET };
    if ctx::is_connected(ctx) {
        let nat = sock_nat::lookup(ctx, &slot);
        if nat.backend == *backend {
            return nat.service;
        }
    }
    udp_nat::service_of(ctx, &slot, backend)
}
