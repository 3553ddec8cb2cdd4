//! Redirects the probe addresses: proof to any prober that the program runs.
//!
//! Invariant: only unmatched destinations of TCP and UDP sockets are compared, whose release hook runs (see
//! [`crate::release`]).

use proxy_common::{
    counters::NO_COUNTER,
    decide::{Selection, Verdict},
    net::{Be16, V4, V6},
    probe::{ADDRESS4, ADDRESS6},
    tables::{Family, TCP, UDP},
};

/// An address family with a probe address.
pub(crate) trait ProbeFamily: Family {
    /// The probe address.
    const PROBE: Self;
    /// The loopback address.
    const LOOPBACK: Self;
}

impl ProbeFamily for V4 {
    const PROBE: Self = ADDRESS4;
    const LOOPBACK: Self = Self::LOOPBACK;
}

impl ProbeFamily for V6 {
    const PROBE: Self = ADDRESS6;
    const LOOPBACK: Self = Self::LOOPBACK;
}

/// The verdict on a destination, with the probe address redirected to the loopback address and not counted.
#[inline(always)]
pub(crate) fn redirect<F: ProbeFamily>(
    verdict: Verdict<F::Backend>,
    ip: F,
    port: Be16,
    protocol: u8,
) -> Verdict<F::Backend> {
    match verdict {
        Verdict::Pass if ip == F::PROBE && matches!(protocol, TCP | UDP) => Verdict::Redirect(Selection {
            backend: F::LOOPBACK.backend(port),
            port_counter: NO_COUNTER,
            backend_counter: NO_COUNTER,
        }),
        verdict => verdict,
    }
}
