//! What the kernel counts: the CPU time and memory of processes, the memory of BPF maps, and the run time of BPF programs.
//!
//! Run times are counted only inside [`run_time`], because counting itself costs time.

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use anyhow::{Context as _, Result};
use aya::{
    programs::{
        ProgramInfo,
        links::{FdLink, PinnedLink},
        loaded_programs,
    },
    sys::{Stats, enable_stats},
};
use tests::agent::memory_kb;

use crate::figures::median;

/// How often the work is measured.
const BATCHES: usize = 50;

/// A field of the memory of a process: `VmRSS` is what is resident, `VmHWM` the most that was.
pub(crate) fn memory_mb(pid: u32, field: &str) -> Result<f64> {
    Ok(memory_kb(pid, field)? as f64 / 1024.0)
}

pub(crate) fn cpu_seconds(pid: u32) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).context("the process has ended")?;
    // The second field, in parentheses, may contain anything; utime and stime are the 14th and the 15th.
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: f64 = fields.skip(11).take(2).filter_map(|it| it.parse::<f64>().ok()).sum();
    // USER_HZ is 100 on every supported architecture.
    Ok(ticks / 100.0)
}

/// The bytes of each BPF map that a process has open, by the map's id.
pub(crate) fn open_maps(pid: u32) -> Result<BTreeMap<u32, u64>> {
    let mut maps = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        let text = fs::read_to_string(entry?.path()).unwrap_or_default();
        let field = |name: &str| {
            let line = text.lines().find_map(|it| it.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|it| it.trim().parse::<u64>().ok())
        };
        if let (Some(id), Some(bytes)) = (field("map_id"), field("memlock")) {
            maps.insert(u32::try_from(id)?, bytes);
        }
    }
    Ok(maps)
}

/// The run time of a program in nanoseconds, the median over batches of its runs during `work`: of one run, or of one of so
/// many `parts` of the work. The
/// kernel also counts interrupts of a program, and the time that other guests of the machine take from it. The program is the
/// one that a pinned link has attached: a trace puts another one there.
pub(crate) fn run_time(
    link: &Path,
    parts: Option<usize>,
    mut work: impl FnMut() -> Result<()>,
) -> Result<f64> {
    let _counting = enable_stats(Stats::RunTime).context("cannot have the kernel count run times")?;
    let read = || -> Result<(u64, Duration)> {
        let program = linked_program(link);
        let program = program.with_context(|| format!("cannot read the program at {}", link.display()))?;
        // Two reads of the clock are a part of each run.
        Ok((program.run_count(), program.run_time()))
    };
    let mut figures = Vec::with_capacity(BATCHES);
    for _ in 0..BATCHES {
        let (runs_before, time_before) = read()?;
        work()?;
        let (runs, time) = read()?;
        let parts = parts.map_or((runs - runs_before).max(1) as f64, |it| it as f64);
        figures.push((time - time_before).as_nanos() as f64 / parts);
    }
    Ok(median(figures))
}

/// The program that a pinned link has attached.
pub(crate) fn linked_program(link: &Path) -> Result<ProgramInfo> {
    let id = FdLink::from(PinnedLink::from_pin(link)?).info()?.program_id();
    let mut programs = loaded_programs().flatten();
    programs.find(|it| it.id() == id).context("it is gone")
}
