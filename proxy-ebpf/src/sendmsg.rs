//! sendmsg4, sendmsg6: redirects a datagram of an unconnected socket to a backend of its Service, and to the same one as
//! before while that is still in the Service's set.
//!
//! The hooks also run for `sendto(address)` on a connected socket: that is redirected to the connected backend, as the
//! kernel would drop the reply of any other. If the socket was connected before the hooks were attached, it passes.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use proxy_common::{
    counters::{DENIED, LEFT_TO_PACKETS, NO_BACKEND},
    decide::{SocketContext as _, Verdict},
    net::{SockAddr, V4, V6},
    sock_nat::SockNat,
};

use crate::{
    caller::Caller,
    counters,
    ctx::{self, ECONNREFUSED, ENOBUFS, PASS},
    side::FamilyTables,
    sock_nat::{self, Insertion},
    trace::{self, ReportingFamily},
    udp_nat,
};

/// IPv4, and v4-mapped destinations of v6 sockets.
#[cgroup_sock_addr(sendmsg4)]
#[inline(always)]
pub(crate) fn sendmsg4(ctx: SockAddrContext) -> i32 {
    try_sendmsg::<V4>(&ctx).unwrap_or(PASS)
}

#[cgroup_sock_addr(sendmsg6)]
#[inline(always)]
pub(crate) fn sendmsg6(ctx: SockAddrContext) -> i32 {
    try_sendmsg::<V6>(&ctx).unwrap_or(PASS)
}

#[inline(always)]
fn try_sendmsg<F: ReportingFamily + FamilyTables>(ctx: &SockAddrContext) -> Option<i32> {
    let service = ctx::sock_addr::<F>(ctx);
    let caller = Caller::for_sendmsg(ctx, service);
    if ctx::is_connected(ctx) {
        if let Some(backend) = connected_backend(ctx, &caller, &service) {
            ctx::rewrite::<F>(ctx, &backend)?;
            return Some(PASS);
        }
        if ctx::is_peer(ctx, &service) {
            return Some(PASS);
        }
    }
    let counter = match caller.decide(F::address(ctx))? {
        Verdict::Pass => {
            trace::passed::<F>(ctx, &caller);
            udp_nat::remove(ctx, &caller.slot()?, &service);
            return Some(PASS);
        }
        Verdict::Refuse { port_counter } => {
            trace::no_backends::<F>(ctx, &caller, port_counter);
            counters::increment(port_counter + NO_BACKEND);
            return Some(ctx::fail(ECONNREFUSED));
        }
        Verdict::Leave { counter } => counter,
        Verdict::Redirect(selection) => {
            let nat = SockNat { service, backend: selection.backend };
            match udp_nat::insert(ctx, &mut caller.slot()?, &nat) {
                Insertion::Done => {
                    trace::redirected::<F>(ctx, &caller, &selection);
                    counters::connection(&selection);
                    ctx::rewrite::<F>(ctx, &selection.backend)?;
                    return Some(PASS);
                }
                Insertion::NoRoom if !caller.packets_serve() || F::address(ctx).is_loopback() => {
                    trace::no_room::<F>(ctx, &caller, &selection);
                    counters::increment(selection.port_counter + DENIED);
                    return Some(ctx::fail(ENOBUFS));
                }
                Insertion::NotOurs | Insertion::NoRoom => selection.port_counter + LEFT_TO_PACKETS,
            }
        }
    };
    trace::left_to_packets::<F>(ctx, &caller, counter);
    counters::increment(counter);
    Some(PASS)
}

/// The backend for datagrams of a connected socket to its own Service. The socket's peer is compared, as a later connect to
/// elsewhere may have failed.
#[inline(always)]
fn connected_backend(ctx: &SockAddrContext, caller: &Caller<'_>, service: &SockAddr) -> Option<SockAddr> {
    let nat = sock_nat::lookup(ctx, &caller.slot()?);
    (nat.service == *service && ctx::is_peer(ctx, &nat.backend)).then_some(nat.backend)
}
