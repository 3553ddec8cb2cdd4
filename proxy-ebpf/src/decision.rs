//! The verdict on a destination, with everything that overrides the tables: exclusions, and the probe addresses.

use aya_ebpf::programs::SockAddrContext;
use proxy_common::{
    decide::{Verdict, decide},
    net::SockAddr,
};

use crate::{
    caller::Caller,
    ctx,
    probe::{self, ProbeFamily},
    side::{FamilyTables, Side},
};

/// The verdict on the destination `ip`, with the port and protocol of the context; none if there is no generation.
///
/// `previous` is the backend that this socket used for this destination before, or unset.
#[inline(always)]
pub(crate) fn verdict<F: FamilyTables + ProbeFamily>(
    ctx: &SockAddrContext,
    caller: &Caller<'_>,
    ip: F,
    is_excluded: bool,
    previous: SockAddr,
) -> Option<Verdict<SockAddr>> {
    let (port, protocol) = (ctx::port(ctx), ctx::protocol(ctx));
    let side = Side::<F>::active()?;
    let verdict = match is_excluded {
        true => Verdict::Pass,
        false => decide(&side, caller, ip, port, protocol, F::backend_at(previous)),
    };
    Some(probe::redirect(verdict, ip, port, protocol).map(F::sock_addr))
}
