//! The cost of BPF programs, as the kernel counts it.
//!
//! Counting is on only inside [`ProgramStats::median`], because counting itself costs time.

use std::path::Path;

use anyhow::{Context as _, Result};
use aya::{
    programs::{
        ProgramInfo,
        links::{FdLink, PinnedLink},
        loaded_programs,
    },
    sys::{Stats, enable_stats},
};

use crate::figures::median;

/// How often the work is measured.
const BATCHES: usize = 50;

/// How often a program ran and for how long in total.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProgramStats {
    runs: u64,
    /// The total run time in nanoseconds, including two reads of the clock per run.
    nanoseconds: u64,
}

impl ProgramStats {
    /// The median of a figure over batches of the runs of a program during `work`, whatever causes them: the kernel also counts
    /// an interrupt of a program as its run time, and what other guests of the machine take from it. The program is the one that
    /// a pinned link has attached: a trace puts another one there.
    pub(crate) fn median(
        link: &Path,
        figure: impl Fn(Self) -> f64,
        mut work: impl FnMut() -> Result<()>,
    ) -> Result<f64> {
        let _counting = enable_stats(Stats::RunTime).context("cannot have the kernel count run times")?;
        let mut figures = Vec::with_capacity(BATCHES);
        for _ in 0..BATCHES {
            let before = Self::read(link)?;
            work()?;
            let after = Self::read(link)?;
            figures.push(figure(Self {
                runs: after.runs - before.runs,
                nanoseconds: after.nanoseconds - before.nanoseconds,
            }));
        }
        Ok(median(figures))
    }

    fn read(link: &Path) -> Result<Self> {
        let info =
            linked_program(link).with_context(|| format!("cannot read the program at {}", link.display()))?;
        Ok(Self { runs: info.run_count(), nanoseconds: info.run_time().as_nanos() as u64 })
    }

    /// The run time in nanoseconds.
    pub(crate) fn sum(self) -> f64 {
        self.nanoseconds as f64
    }

    /// The mean run time in nanoseconds.
    pub(crate) fn mean(self) -> f64 {
        self.nanoseconds as f64 / self.runs.max(1) as f64
    }
}

/// The program that a pinned link has attached.
pub(crate) fn linked_program(link: &Path) -> Result<ProgramInfo> {
    let id = FdLink::from(PinnedLink::from_pin(link)?).info()?.program_id();
    let mut programs = loaded_programs().flatten();
    programs.find(|it| it.id() == id).context("it is gone")
}
