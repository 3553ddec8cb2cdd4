//! sock_release: frees what was kept for a socket when it is closed.

use aya_ebpf::{macros::cgroup_sock, programs::SockContext};
use proxy_common::tables::{TCP, UDP};

use crate::{
    ctx::{self, PASS},
    sock_nat, trace,
};

/// Runs when the last descriptor of a socket is closed.
#[cgroup_sock(sock_release)]
#[inline(always)]
pub(crate) fn sock_release(ctx: SockContext) -> i32 {
    let protocol = ctx::released_protocol(&ctx);
    if matches!(protocol, TCP | UDP) {
        sock_nat::release(&ctx);
        trace::released(&ctx);
    }
    PASS
}
