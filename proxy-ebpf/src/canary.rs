//! Leads the canary's addresses: proof that this program runs, for whoever asks.
//!
//! The one rule: only what is nobody else's is looked at, and only of sockets whose release is told (see [`crate::release`]).

use proxy_common::{
    canary::{ADDRESS4, ADDRESS6},
    counters::UNCOUNTED,
    decide::{Led, Verdict},
    net::{Be16, V4, V6},
    tables::{Backend4, Backend6, TCP, UDP},
};

/// The verdict on a destination, the canary's being led.
#[inline(always)]
pub(crate) fn lead4(verdict: Verdict<Backend4>, ip: V4, port: Be16, protocol: u8) -> Verdict<Backend4> {
    match verdict {
        Verdict::Pass if ip == ADDRESS4 && matches!(protocol, TCP | UDP) => {
            uncounted(Backend4 { address: V4::LOOPBACK, port, zero: 0 })
        }
        verdict => verdict,
    }
}

/// The same over IPv6.
#[inline(always)]
pub(crate) fn lead6(verdict: Verdict<Backend6>, ip: V6, port: Be16, protocol: u8) -> Verdict<Backend6> {
    match verdict {
        Verdict::Pass if ip == ADDRESS6 && matches!(protocol, TCP | UDP) => {
            uncounted(Backend6 { address: V6::LOOPBACK, port, zero: 0 })
        }
        verdict => verdict,
    }
}

/// Leads there, and counts for nothing.
#[inline(always)]
fn uncounted<Backend>(backend: Backend) -> Verdict<Backend> {
    Verdict::To(Led { backend, port: UNCOUNTED, cell: UNCOUNTED })
}
