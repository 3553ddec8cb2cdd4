//! `cargo xtask simulate`: the control path, simulated from a seed.
//!
//! The API server's watches, brains, their gRPC servers, agents and other clients are the product's own code, in one thread on
//! paused time; the network, the API server and the kernels are simulated. Everything that happens depends on the seed alone.
//!
//! Invariant: a seed is a process. Nothing that one leaves behind reaches another, so that it can be run again.
//!
//! # What it finds
//!
//! With one of these defects in the product, this many of the first 100 seeds failed, and this was the first:
//!
//! | defect | seeds | first |
//! |---|---|---|
//! | the server sends no deletes of endpoints | 4 | 6 |
//! | the client hands over a change set before its sync | 83 | 1 |
//! | the client ignores a reset | 32 | 4 |
//! | objects that a new list lacks stay | 3 | 11 |
//! | a list after an expired watch may be of any age | 0 | 630 |
//! | a state that could not be applied is not applied again | 10 | 1 |
//!
//! Not found in 1,000 seeds: digests of what a broken stream sent, instead of the last complete state. The property
//! `it_describes_what_a_plain_map_has` of the client library finds it.
//!
//! # What it leaves out
//!
//! Manifests as a source, TLS, the long poll, the maps and the packet path below a kernel (`double_buffer` and `datapath-nft` have
//! tests of their own), the reconciler's loop, whose steps run on other threads (`kernel` takes its place), and brains of other
//! versions.

mod brain;
mod chance;
mod clients;
mod history;
mod kernel;
mod manifest;
mod network;
mod simulation;
mod truth;
mod world;

use std::{
    env, panic,
    process::{Command, ExitCode, Output},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use build_tools::{
    command::{exit_code, status},
    parallel::in_parallel,
};
use clap::Parser;
use parking_lot::Mutex;
use tokio::runtime;

/// Simulate the control path from seeds: API server, brains and agents, with every fault between them.
///
/// Watches that break and expire, connections that are late, cut at any byte or silent, brains and agents that are killed, clients
/// of other versions, clocks that jump, states that cannot be applied. Each state that a consumer has must be one that was true,
/// and none that was true before the one it had; when all faults have ended, all must have the newest. A seed that fails is printed
/// with its history.
#[derive(Parser)]
#[command(bin_name = "cargo xtask simulate", max_term_width = 100)]
struct Arguments {
    /// How many seeds
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    seeds: u64,
    /// The first seed
    #[arg(long, value_name = "N", default_value_t = 1)]
    from: u64,
    /// How long at most
    #[arg(long, value_name = "M")]
    minutes: Option<u64>,
    /// Only this seed, with its history
    #[arg(long, value_name = "N", conflicts_with_all = ["seeds", "from", "minutes"])]
    seed: Option<u64>,
    /// With `--seed`: print the log of all processes, too
    #[arg(long, requires = "seed")]
    log: bool,
    /// Only the result of the seed
    #[arg(long, requires = "seed", hide = true)]
    brief: bool,
    /// With kernels that forget some of what they are to apply, which must be found
    #[arg(long, hide = true)]
    lossy: bool,
}

/// How long a simulation may take, by the system's clock.
const MAX_DURATION: Duration = Duration::from_secs(120);
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// How many failing seeds are printed with their histories.
const MAX_HISTORIES: usize = 3;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match arguments.seed {
        Some(seed) => exit_code(simulate(seed, &arguments)),
        None => exit_code(simulate_all(&arguments)),
    }
}

fn simulate(seed: u64, arguments: &Arguments) -> Result<()> {
    chance::begin(seed);
    panic::set_hook(Box::new(|panic| history::fail(panic)));
    thread::spawn(|| {
        thread::sleep(MAX_DURATION);
        history::fail(format_args!("no end after {MAX_DURATION:?}: something is busy without waiting"))
    });
    if arguments.log {
        tracing_subscriber::fmt()
            .with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG)
            .with_writer(std::io::stderr)
            .init();
    }
    let is_lossy = arguments.lossy;
    // The standard library asks for randomness once for each thread.
    let simulation = thread::spawn(move || {
        fastrand::seed(seed);
        let runtime = runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
        runtime.block_on(async {
            let summary = simulation::run(is_lossy).await;
            Ok::<_, std::io::Error>((summary, history::now()))
        })
    });
    let (summary, took) =
        simulation.join().unwrap_or_else(|_| history::fail("the simulation has panicked"))?;
    if !arguments.brief {
        history::print();
    }
    println!(
        "seed {seed}: {} states checked in {} s; all had the newest {:.1} s after the last fault; hash {:016x}",
        summary.checked,
        took.as_secs(),
        summary.convergence.as_secs_f64(),
        history::hash()
    );
    Ok(())
}

/// Simulates many seeds, each in a process of its own, as many at a time as there are processors, until the time is over.
fn simulate_all(arguments: &Arguments) -> Result<()> {
    let begin = Instant::now();
    let until = arguments.minutes.map(|it| begin + Duration::from_secs(60 * it));
    let seeds = arguments.from..arguments.from.saturating_add(arguments.seeds);
    let seeds = seeds.take_while(|_| until.is_none_or(|it| Instant::now() < it));
    let failed = Mutex::new(Vec::new());
    let shown = Mutex::new((0, begin));
    let workers = thread::available_parallelism().map_or(1, usize::from);
    in_parallel(workers, seeds, |seed| {
        let Output { status: outcome, stdout, stderr } = simulate_apart(seed, arguments.lossy)?;
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

fn simulate_apart(seed: u64, is_lossy: bool) -> Result<Output> {
    let mut command = Command::new(env::current_exe().context("where this program is")?);
    command.args(["--brief", "--seed", &seed.to_string()]).args(is_lossy.then_some("--lossy"));
    command.output().context("cannot start a simulation")
}
