//! Many seeds, each in a process of its own, as many at a time as there are processors.

use std::{
    env,
    process::{Command, Output},
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use anyhow::{Context as _, Result, bail};
use build_tools::{command::status, parallel::in_parallel};

const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// How many failing seeds are printed with their histories.
const MAX_HISTORIES: usize = 3;

/// Simulates the seeds from `first` on, until there were as many as `count` or the time is over.
pub(crate) fn run(first: u64, count: u64, minutes: Option<u64>, is_lossy: bool) -> Result<()> {
    let begin = Instant::now();
    let until = minutes.map(|it| begin + Duration::from_secs(60 * it));
    let seeds = first..first.saturating_add(count);
    let seeds = seeds.take_while(|_| until.is_none_or(|it| Instant::now() < it));
    let failed = Mutex::new(Vec::new());
    let shown = Mutex::new((0, begin));
    let workers = thread::available_parallelism().map_or(1, usize::from);
    in_parallel(workers, seeds, |seed| {
        let Output { status: outcome, stdout, stderr } = simulate(seed, is_lossy)?;
        let mut failed = failed.lock();
        if !outcome.success() {
            if failed.len() < MAX_HISTORIES {
                println!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
            }
            status("Failed", &format!("seed {seed}; again with --seed {seed}"));
            failed.push(seed);
        }
        let (done, last_shown) = &mut *shown.lock();
        *done += 1;
        if last_shown.elapsed() >= PROGRESS_INTERVAL {
            *last_shown = Instant::now();
            status("Simulated", &progress(*done, begin, failed.len()));
        }
        Ok(())
    })?;
    let mut failed = failed.into_inner();
    let (done, _) = shown.into_inner();
    status("Simulated", &progress(done, begin, failed.len()));
    if failed.is_empty() {
        return Ok(());
    }
    failed.sort_unstable();
    bail!("{} of {done} seeds fail: {failed:?}", failed.len())
}

fn progress(done: u64, begin: Instant, failed: usize) -> String {
    let seconds = begin.elapsed().as_secs_f64();
    format!("{done} seeds in {seconds:.0} s, {:.0} per minute, {failed} failed", 60.0 * done as f64 / seconds)
}

/// Simulates one in a process of its own.
fn simulate(seed: u64, is_lossy: bool) -> Result<Output> {
    let mut command = Command::new(env::current_exe().context("where this program is")?);
    command.args(["--brief", "--seed", &seed.to_string()]).args(is_lossy.then_some("--lossy"));
    command.output().context("cannot start a simulation")
}
