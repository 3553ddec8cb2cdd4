//! getpeername4, getpeername6: shows the address that the program connected to.
//!
//! These hooks must return [`PASS`]; the kernel accepts nothing else.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use proxy_common::net::{V4, V6};

use crate::{
    ctx::{self, HookFamily, PASS},
    slot::SlotRef,
    sock_nat,
};

/// Peers of v4 sockets.
#[cgroup_sock_addr(getpeername4)]
#[inline(always)]
pub(crate) fn getpeername4(ctx: SockAddrContext) -> i32 {
    rewrite_peer::<V4>(&ctx)
}

/// Peers of v6 sockets, v4-mapped ones included.
#[cgroup_sock_addr(getpeername6)]
#[inline(always)]
pub(crate) fn getpeername6(ctx: SockAddrContext) -> i32 {
    rewrite_peer::<V6>(&ctx)
}

#[inline(always)]
fn rewrite_peer<F: HookFamily>(ctx: &SockAddrContext) -> i32 {
    let peer = ctx::sock_addr::<F>(ctx);
    if let Some(slot) = SlotRef::of(ctx) {
        let nat = sock_nat::lookup(ctx, &slot);
        if !nat.backend.is_unset() && nat.backend == peer {
            let _ = ctx::rewrite::<F>(ctx, &nat.service);
        }
    }
    PASS
}
