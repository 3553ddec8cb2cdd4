//! sock_release: a socket that is closed gives back what was kept for it.

use aya_ebpf::{macros::cgroup_sock, programs::SockContext};

use proxy_common::tables::{TCP, UDP};

use crate::{PASS, ctx, datagrams, memory};

/// Sockets of both families, when their last descriptor is closed.
#[cgroup_sock(sock_release)]
pub(crate) fn sock_release(ctx: SockContext) -> i32 {
    let protocol = ctx::protocol_of(&ctx);
    if matches!(protocol, TCP | UDP) {
        memory::release(&ctx);
    }
    if protocol == UDP {
        datagrams::release(&ctx);
    }
    PASS
}
