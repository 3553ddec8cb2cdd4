//! connect4, connect6: a new connection to a Service goes to one of its backends.
//!
//! From here on the kernel talks to the backend directly; nothing is paid per packet.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use proxy_common::{
    decide::{Tables as _, Verdict, decide},
    net::{Be16, V4, V6},
    socket::{Address, Translation},
    tables::{Backend4, Backend6, UDP},
};

use crate::{
    PASS, canary, counters, ctx, datagrams,
    maps::Side,
    memory::{self, Memory},
    process::Process,
    scope,
};

/// IPv4, also of v6 sockets that were given a v4 address.
#[cgroup_sock_addr(connect4)]
pub(crate) fn connect4(ctx: SockAddrContext) -> i32 {
    try_connect4(&ctx).unwrap_or(PASS)
}

/// IPv6 and v4-mapped.
#[cgroup_sock_addr(connect6)]
pub(crate) fn connect6(ctx: SockAddrContext) -> i32 {
    try_connect6(&ctx).unwrap_or(PASS)
}

#[inline(always)]
fn try_connect4(ctx: &SockAddrContext) -> Option<i32> {
    let (ip, port, protocol) = (ctx::ip4(ctx), ctx::port(ctx), ctx::protocol(ctx));
    let process = Process::that_connects(ctx);
    let side = Side::<V4>::active()?;
    let verdict = match scope::is_left_alone(ctx) {
        true => Verdict::Pass,
        false => decide(&side, &process, ip, port, protocol, Backend4::default()),
    };
    match canary::lead4(verdict, ip, port, protocol) {
        Verdict::Pass => forget(ctx, &Address::new(ip.mapped(), port)),
        Verdict::Refuse { port } => {
            counters::refusal(port);
            return Some(ctx::refuse_connect4(ctx));
        }
        Verdict::To(led) => {
            process.counter().connection(&led);
            let backend = led.backend;
            remember(ctx, &process.memory()?, ip.mapped(), port, backend.address.mapped(), backend.port);
            ctx::rewrite4(ctx, backend.address, backend.port);
        }
    }
    Some(PASS)
}

#[inline(always)]
fn try_connect6(ctx: &SockAddrContext) -> Option<i32> {
    let (ip, port, protocol) = (ctx::ip6(ctx), ctx::port(ctx), ctx::protocol(ctx));
    let process = Process::that_connects(ctx);
    let mapped = ip.to_v4();
    let is_left_alone = scope::is_left_alone(ctx);
    let verdict = match mapped {
        Some(ip) => {
            let side = Side::<V4>::active()?;
            let verdict = match is_left_alone {
                true => Verdict::Pass,
                false => decide(&side, &process, ip, port, protocol, Backend4::default()),
            };
            canary::lead4(verdict, ip, port, protocol).map(|it| side.address_of(it))
        }
        None => {
            let side = Side::<V6>::active()?;
            let verdict = match is_left_alone {
                true => Verdict::Pass,
                false => decide(&side, &process, ip, port, protocol, Backend6::default()),
            };
            canary::lead6(verdict, ip, port, protocol).map(|it| side.address_of(it))
        }
    };
    match verdict {
        Verdict::Pass => forget(ctx, &Address::new(ip, port)),
        Verdict::Refuse { port } => {
            counters::refusal(port);
            return Some(ctx::refuse_connect6(ctx, mapped.is_some()));
        }
        Verdict::To(led) => {
            process.counter().connection(&led);
            let backend = led.backend;
            remember(ctx, &process.memory()?, ip, port, backend.ip, backend.port);
            ctx::rewrite6(ctx, backend.ip, backend.port);
        }
    }
    Some(PASS)
}

/// Keeps the Service's address for getpeername and for the source of replies.
#[inline(always)]
fn remember(
    ctx: &SockAddrContext,
    memory: &Memory,
    service: V6,
    service_port: Be16,
    backend: V6,
    backend_port: Be16,
) {
    memory::remember(
        ctx,
        memory,
        &Translation {
            service: Address::new(service, service_port),
            backend: Address::new(backend, backend_port),
        },
    );
}

/// A socket that is connected elsewhere now must not show the Service it was connected to before.
///
/// (A connect that is refused leaves a UDP socket connected where it was, and so does what is remembered; before 5.18 it
/// leads nowhere, see [`ctx::refuse_connect4`]. One that fails later, for want of a route, leaves it, too, but that no hook
/// sees. What is remembered then counts no more, as it is compared with where the socket goes.)
#[inline(always)]
fn forget(ctx: &SockAddrContext, destination: &Address) {
    if ctx::was_never_connected(ctx) {
        return;
    }
    memory::forget(ctx);
    if ctx::protocol(ctx) == UDP {
        datagrams::forget(ctx, destination);
    }
}
