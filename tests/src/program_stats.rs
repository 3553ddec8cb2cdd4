//! What the kernel's programs cost, by the kernel's own count.
//! The one rule: nothing is counted outside [`ProgramStats::of`], since counting itself costs.

use std::path::Path;

use anyhow::{Context as _, Result};
use aya::{
    programs::ProgramInfo,
    sys::{Stats, enable_stats},
};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

/// How often a program ran, and for how long altogether.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProgramStats {
    /// How often.
    pub runs: u64,
    /// How long, in nanoseconds; the kernel's two looks at its clock are part of it.
    pub nanoseconds: u64,
}

impl ProgramStats {
    /// Counts what the program pinned at `pin` does while `work` runs. What else uses it meanwhile is
    /// counted too.
    ///
    /// # Errors
    ///
    /// If the kernel cannot count (before Linux 5.8), there is no such program, or `work` fails.
    pub fn of(pin: &Path, work: impl FnOnce() -> Result<()>) -> Result<Self> {
        let _counting = enable_stats(Stats::RunTime).context("cannot have the kernel count run times")?;
        let before = Self::read(pin)?;
        work()?;
        let after = Self::read(pin)?;
        Ok(Self { runs: after.runs - before.runs, nanoseconds: after.nanoseconds - before.nanoseconds })
    }

    /// Has the program of sock_release run `times` times for sockets that are none of its business.
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

    /// How many instructions the verifier went through for the program pinned at `pin`; at a million it gives up.
    /// `None` if the kernel does not tell (before Linux 5.16).
    ///
    /// # Errors
    ///
    /// If there is no such program.
    pub fn of_verifier(pin: &Path) -> Result<Option<u32>> {
        Ok(info(pin)?.verified_instruction_count())
    }

    /// The mean of a run in nanoseconds.
    #[must_use]
    pub fn mean(self) -> f64 {
        self.nanoseconds as f64 / self.runs.max(1) as f64
    }
}

fn info(pin: &Path) -> Result<ProgramInfo> {
    ProgramInfo::from_pin(pin).with_context(|| format!("cannot read the program {}", pin.display()))
}
