//! The cost of BPF programs, as the kernel counts it.
//!
//! Counting is on only inside [`ProgramStats::of`], because counting itself costs time.

use std::path::Path;

use anyhow::{Context as _, Result};
use aya::{
    programs::ProgramInfo,
    sys::{Stats, enable_stats},
};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

/// How often a program ran and for how long in total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProgramStats {
    /// The number of runs.
    pub runs: u64,
    /// The total run time in nanoseconds, including two reads of the clock per run.
    pub nanoseconds: u64,
}

impl ProgramStats {
    /// Counts the runs of the program pinned at `pin` during `work`, whatever causes them.
    ///
    /// # Errors
    ///
    /// If the kernel cannot count (before Linux 5.8), the program does not exist, or `work` fails.
    pub fn of(pin: &Path, work: impl FnOnce() -> Result<()>) -> Result<Self> {
        let _counting = enable_stats(Stats::RunTime).context("cannot have the kernel count run times")?;
        let before = Self::read(pin)?;
        work()?;
        let after = Self::read(pin)?;
        Ok(Self { runs: after.runs - before.runs, nanoseconds: after.nanoseconds - before.nanoseconds })
    }

    /// Runs the sock_release program `times` times for sockets without an entry.
    ///
    /// # Errors
    ///
    /// The system call's.
    pub fn close_raw_sockets(times: usize) -> Result<()> {
        for _ in 0..times {
            drop(socket(AddressFamily::Inet, SockType::Raw, SockFlag::empty(), SockProtocol::Icmp)?);
        }
        Ok(())
    }

    fn read(pin: &Path) -> Result<Self> {
        let info = info(pin)?;
        Ok(Self { runs: info.run_count(), nanoseconds: info.run_time().as_nanos() as u64 })
    }

    /// How many instructions the verifier processed for the program pinned at `pin`; its limit is a million.
    /// `None` if the kernel does not report it (before Linux 5.16).
    ///
    /// # Errors
    ///
    /// If the program does not exist.
    pub fn verified_instructions(pin: &Path) -> Result<Option<u32>> {
        Ok(info(pin)?.verified_instruction_count())
    }

    /// The mean run time in nanoseconds.
    #[must_use]
    pub fn mean(self) -> f64 {
        self.nanoseconds as f64 / self.runs.max(1) as f64
    }
}

fn info(pin: &Path) -> Result<ProgramInfo> {
    ProgramInfo::from_pin(pin).with_context(|| format!("cannot read the program {}", pin.display()))
}
