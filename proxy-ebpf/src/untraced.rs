//! What takes the place of `trace` in the product's programs: nothing.

use aya_ebpf::programs::{SockAddrContext, SockContext, SockOpsContext};
use proxy_common::{counters::CounterIndex, decide::Selection};

use crate::{caller::Caller, ctx::HookFamily};

/// An address family of hooks.
pub(crate) trait ReportingFamily: HookFamily {}

impl<F: HookFamily> ReportingFamily for F {}

#[inline(always)]
pub(crate) fn begin(_: &SockAddrContext, _: &Caller<'_>) {}

#[inline(always)]
pub(crate) fn passed<F: ReportingFamily>(_: &SockAddrContext, _: &Caller<'_>) {}

#[inline(always)]
pub(crate) fn no_backends<F: ReportingFamily>(_: &SockAddrContext, _: &Caller<'_>, _: CounterIndex) {}

#[inline(always)]
pub(crate) fn redirected<F: ReportingFamily>(_: &SockAddrContext, _: &Caller<'_>, _: &Selection) {}

#[inline(always)]
pub(crate) fn left_to_packets<F: ReportingFamily>(_: &SockAddrContext, _: &Caller<'_>, _: CounterIndex) {}

#[inline(always)]
pub(crate) fn no_room<F: ReportingFamily>(_: &SockAddrContext, _: &Caller<'_>, _: &Selection) {}

#[inline(always)]
pub(crate) fn on_sock_ops(_: &SockOpsContext) {}

#[inline(always)]
pub(crate) fn released(_: &SockContext) {}
