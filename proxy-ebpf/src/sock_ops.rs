//! sock_ops: watches the TCP connections that were translated until they are established or have failed.
//!
//! Invariant: a connection counts as failed once at most. Neither a program that closes its socket early nor an error on the
//! way out is a failure of the endpoint: only silence and a reset are.

use aya_ebpf::{
    bindings::{
        BPF_SOCK_OPS_RTO_CB, BPF_SOCK_OPS_RTO_CB_FLAG, BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG,
        BPF_SOCK_OPS_TCP_CONNECT_CB,
    },
    macros::sock_ops,
    programs::SockOpsContext,
};
use proxy_common::{
    health::{REFUSALS, TIMEOUTS},
    sock_nat::NatSlot,
};

use crate::{ctx, health, slot::SlotRef};

const TCP_ESTABLISHED: u32 = 1;
const TCP_SYN_SENT: u32 = 2;
const TCP_CLOSE: u32 = 7;

/// The calls for time-outs and for changes of the state, which only watched connections ask for.
const CALLS: i32 = (BPF_SOCK_OPS_RTO_CB_FLAG | BPF_SOCK_OPS_STATE_CB_FLAG).cast_signed();

/// Every TCP socket, at several moments.
#[sock_ops]
pub(crate) fn sock_ops(ctx: SockOpsContext) -> u32 {
    match ctx::operation(&ctx) {
        BPF_SOCK_OPS_TCP_CONNECT_CB if health::take_watch(ctx::cookie(&ctx)) => begin(&ctx),
        BPF_SOCK_OPS_RTO_CB if ctx::tcp_state(&ctx) == TCP_SYN_SENT => failed(&ctx, TIMEOUTS),
        // The state is that before the change.
        BPF_SOCK_OPS_STATE_CB if ctx::tcp_state(&ctx) == TCP_SYN_SENT => end(&ctx),
        _ => {}
    }
    // Other programs may follow.
    1
}

/// Watches a connection.
#[inline(always)]
fn begin(ctx: &SockOpsContext) {
    let Some(own) = slot(ctx) else { return };
    // The connect that was translated may have failed for want of a route, and this be another one.
    if ctx::is_remote(ctx, &own.connected().backend) {
        // Beside the calls of other programs. They stay: whose they are is not known at the end.
        let _ = ctx.set_cb_flags(ctx.cb_flags().cast_signed() | CALLS);
    } else {
        own.watch = own.watch.settled();
    }
}

/// The connection is established, or has ended before.
#[inline(always)]
fn end(ctx: &SockOpsContext) {
    match ctx::next_tcp_state(ctx) {
        TCP_ESTABLISHED => {
            if let Some(own) = slot(ctx) {
                health::succeeded(own);
            }
        }
        TCP_CLOSE if ctx::has_received(ctx) => failed(ctx, REFUSALS),
        _ => {}
    }
    if let Some(own) = slot(ctx) {
        own.watch = own.watch.settled();
    }
}

#[inline(always)]
fn failed(ctx: &SockOpsContext, reason: u32) {
    if let Some(own) = slot(ctx) {
        health::failed(own, reason);
    }
}

/// The slot of the socket, if it has one.
///
/// Another CPU may release the socket meanwhile, and a third one claim the slot for another socket, whose watch would then be
/// overwritten: all within the few instructions from here to the write.
#[inline(always)]
fn slot(ctx: &SockOpsContext) -> Option<&'static mut NatSlot> {
    SlotRef::of(ctx)?.own()
}
