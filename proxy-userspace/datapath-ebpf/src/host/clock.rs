//! The clock of the programs.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use crate::error::Error;

/// The monotonic clock, which `bpf_ktime_get_ns` reads, too.
pub(crate) fn now() -> Result<Duration, Error> {
    clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map(Duration::from)
        .map_err(Error::syscall("clock_gettime", "CLOCK_MONOTONIC"))
}
