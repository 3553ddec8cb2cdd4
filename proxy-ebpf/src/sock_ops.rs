//! sock_ops: watches the TCP connections that were translated until they are established or have failed.
//!
//! Invariant: a connection counts as failed once at most. An error on the way out is no failure of the endpoint: only silence and
//! a reset are. Of a socket that its program closes meanwhile see [`health::given_up`].

use aya_ebpf::{
    bindings::{
        BPF_SOCK_OPS_RETRANS_CB_FLAG, BPF_SOCK_OPS_RTO_CB, BPF_SOCK_OPS_RTO_CB_FLAG, BPF_SOCK_OPS_STATE_CB,
        BPF_SOCK_OPS_STATE_CB_FLAG, BPF_SOCK_OPS_TCP_CONNECT_CB,
    },
    macros::sock_ops,
    programs::SockOpsContext,
};
use proxy_common::{health::Cause, sock_nat::NatSlot};

use crate::{
    ctx::{self, TCP_CLOSE, TCP_ESTABLISHED, TCP_SYN_SENT},
    health, log,
    slot::SlotRef,
    trace,
};

/// The calls for timeouts and for changes of the state, which only watched connections ask for.
const CALLS: u32 = BPF_SOCK_OPS_RTO_CB_FLAG | BPF_SOCK_OPS_STATE_CB_FLAG;
/// Marks a connection for which another program asked for calls before: they stay when ours are over. Itself it asks for calls
/// at retransmissions, which are rare.
const KEEP: u32 = BPF_SOCK_OPS_RETRANS_CB_FLAG;

/// Called for every TCP socket, at several moments.
#[sock_ops]
#[inline(always)]
pub(crate) fn sock_ops(ctx: SockOpsContext) -> u32 {
    trace::on_sock_ops(&ctx);
    match ctx::operation(&ctx) {
        BPF_SOCK_OPS_TCP_CONNECT_CB if health::take_watch(ctx::cookie(&ctx)) => begin(&ctx),
        BPF_SOCK_OPS_RTO_CB if ctx::tcp_state(&ctx) == TCP_SYN_SENT => timed_out(&ctx),
        // The state is that before the change.
        BPF_SOCK_OPS_STATE_CB if ctx::tcp_state(&ctx) == TCP_SYN_SENT => end(&ctx),
        _ => {}
    }
    // Other programs may follow.
    1
}

#[inline(always)]
fn begin(ctx: &SockOpsContext) {
    let Some(own) = slot(ctx) else { return };
    // The connect that was translated may have failed for want of a route, and this be another one.
    if ctx::is_remote(ctx, &own.connected().backend) {
        let others = ctx.cb_flags();
        let calls = if others == 0 { CALLS } else { others | CALLS | KEEP };
        let _ = ctx.set_cb_flags(calls.cast_signed());
    } else {
        own.watch = own.watch.settled();
    }
}

/// The connection is established, or has ended before.
#[inline(always)]
fn end(ctx: &SockOpsContext) {
    // Or else each further change of the state would cost a call. Programs that ask for calls when a connection is
    // established do so after this one.
    if ctx.cb_flags() == CALLS {
        let _ = ctx.set_cb_flags(0);
    }
    let Some(own) = slot(ctx) else { return };
    match ctx::next_tcp_state(ctx) {
        TCP_ESTABLISHED => {
            log::established(ctx);
            health::succeeded(own);
        }
        TCP_CLOSE if ctx::has_received(ctx) => {
            log::connection_refused(ctx);
            health::failed(ctx, own, Cause::Refusal);
        }
        _ => {}
    }
    own.watch = own.watch.settled();
}

/// The first segment was not answered in time.
#[inline(always)]
fn timed_out(ctx: &SockOpsContext) {
    if let Some(own) = slot(ctx) {
        log::timed_out(ctx);
        health::failed(ctx, own, Cause::Timeout);
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
