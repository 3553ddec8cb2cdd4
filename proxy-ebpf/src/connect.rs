//! connect4, connect6: redirects a new connection to a Service to one of its backends.
//!
//! From then on the kernel talks to the backend directly; there is no cost per packet.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use proxy_common::{
    counters::{DENIED, LEFT_TO_PACKETS, NO_BACKEND},
    decide::{SocketContext as _, Verdict},
    net::{SockAddr, V4, V6},
    sock_nat::SockNat,
    tables::UDP,
};

use crate::{
    caller::Caller,
    counters,
    ctx::{self, ENOBUFS, HookFamily as _, PASS},
    sock_nat::{self, Insertion},
    trace::{self, ReportingFamily},
    udp_nat,
};

/// IPv4, also of v6 sockets that were given a v4 address.
#[cgroup_sock_addr(connect4)]
#[inline(always)]
pub(crate) fn connect4(ctx: SockAddrContext) -> i32 {
    try_connect4(&ctx).unwrap_or(PASS)
}

/// IPv6 and v4-mapped.
#[cgroup_sock_addr(connect6)]
#[inline(always)]
pub(crate) fn connect6(ctx: SockAddrContext) -> i32 {
    try_connect6(&ctx).unwrap_or(PASS)
}

#[inline(always)]
fn try_connect4(ctx: &SockAddrContext) -> Option<i32> {
    let caller = Caller::for_connect(ctx);
    let verdict = caller.decide(V4::address(ctx))?;
    apply(ctx, &caller, verdict, V4::LOOPBACK)
}

#[inline(always)]
fn try_connect6(ctx: &SockAddrContext) -> Option<i32> {
    let caller = Caller::for_connect(ctx);
    let ip = V6::address(ctx);
    let mapped = V4::from_mapped(ip);
    let verdict = match mapped {
        Some(ip) => caller.decide(ip),
        None => caller.decide(ip),
    };
    let loopback = if mapped.is_some() { V4::LOOPBACK.mapped() } else { V6::LOOPBACK };
    apply(ctx, &caller, verdict?, loopback)
}

#[inline(always)]
fn apply<F: ReportingFamily>(
    ctx: &SockAddrContext,
    caller: &Caller<'_>,
    verdict: Verdict,
    loopback: F,
) -> Option<i32> {
    let destination = ctx::sock_addr::<F>(ctx);
    let counter = match verdict {
        Verdict::Pass => {
            trace::passed::<F>(ctx, caller);
            remove_nat(ctx, caller, &destination);
            return Some(PASS);
        }
        Verdict::Refuse { port_counter } => {
            trace::no_backends::<F>(ctx, caller, port_counter);
            counters::increment(port_counter + NO_BACKEND);
            return Some(ctx::refuse_connect(ctx, loopback));
        }
        Verdict::Leave { counter } => counter,
        Verdict::Redirect(selection) => {
            // For getpeername, and for the source of replies.
            let nat = SockNat { service: destination, backend: selection.backend };
            match sock_nat::insert(ctx, &mut caller.slot()?, &nat, selection.watch) {
                Insertion::Done => {
                    trace::redirected::<F>(ctx, caller, &selection);
                    caller.counter.get().connection(&selection);
                    ctx::rewrite::<F>(ctx, &selection.backend)?;
                    return Some(PASS);
                }
                Insertion::NoRoom if !caller.packets_serve() || destination.ip.is_loopback() => {
                    trace::no_room::<F>(ctx, caller, &selection);
                    counters::increment(selection.port_counter + DENIED);
                    return Some(ctx::fail(ENOBUFS));
                }
                Insertion::NotOurs | Insertion::NoRoom => selection.port_counter + LEFT_TO_PACKETS,
            }
        }
    };
    trace::left_to_packets::<F>(ctx, caller, counter);
    counters::increment(counter);
    remove_nat(ctx, caller, &destination);
    Some(PASS)
}

/// A socket that is connected elsewhere now must not show the Service it was connected to before.
///
/// (A refused connect leaves a UDP socket connected to its previous peer, and keeps its translation; before 5.18 it
/// disconnects the socket, see [`ctx::refuse_connect`]. A connect that fails later, for want of a route, also leaves the
/// previous peer, but no hook sees that. A translation is therefore compared with the socket's peer before it is used.)
#[inline(always)]
fn remove_nat(ctx: &SockAddrContext, caller: &Caller<'_>, destination: &SockAddr) {
    if ctx::was_never_connected(ctx) {
        return;
    }
    let Some(slot) = caller.slot() else { return };
    sock_nat::remove(ctx, &slot);
    if ctx::protocol(ctx) == UDP {
        udp_nat::remove(ctx, &slot, destination);
    }
}
