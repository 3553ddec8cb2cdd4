//! What takes the place of `trace` in the product's programs: nothing, but lines of log in a developer's build.

use aya_ebpf::{
    EbpfContext,
    programs::{SockAddrContext, SockContext, SockOpsContext},
};
use proxy_common::{
    counters::CounterIndex,
    decide::{Selection, SocketContext as _},
    trace::{LEFT_TO_PACKETS, NO_BACKENDS, NO_ROOM, PASSED, REDIRECTED},
};

use crate::{
    caller::Caller,
    ctx::{self, HookFamily},
    log::{self, LogContext},
};

/// An address family of hooks.
pub(crate) trait ReportingFamily: HookFamily {}

impl<F: HookFamily> ReportingFamily for F {}

impl<C: EbpfContext> LogContext for C {
    #[inline(always)]
    fn logged_socket(&self) -> u64 {
        ctx::cookie(self)
    }
}

#[inline(always)]
pub(crate) fn passed<F: ReportingFamily>(ctx: &SockAddrContext, caller: &Caller<'_>) {
    log::decided(ctx, PASSED + u8::from(caller.is_excluded()));
}

#[inline(always)]
pub(crate) fn no_backends<F: ReportingFamily>(ctx: &SockAddrContext, _: &Caller<'_>, _: CounterIndex) {
    log::decided(ctx, NO_BACKENDS);
}

#[inline(always)]
pub(crate) fn redirected<F: ReportingFamily>(ctx: &SockAddrContext, _: &Caller<'_>, _: &Selection) {
    log::decided(ctx, REDIRECTED);
}

#[inline(always)]
pub(crate) fn left_to_packets<F: ReportingFamily>(ctx: &SockAddrContext, _: &Caller<'_>, _: CounterIndex) {
    log::decided(ctx, LEFT_TO_PACKETS);
}

#[inline(always)]
pub(crate) fn no_room<F: ReportingFamily>(ctx: &SockAddrContext, _: &Caller<'_>, _: &Selection) {
    log::decided(ctx, NO_ROOM);
}

#[inline(always)]
pub(crate) fn on_sock_ops(_: &SockOpsContext) {}

#[inline(always)]
pub(crate) fn released(ctx: &SockContext) {
    log::closed(ctx);
}
