//! `cargo xtask kill-matrix`: the proxy is killed, or a system call of its fails, at each step that changes something.

mod matrix;
mod share;
mod step;
mod trace;

use std::{
    env,
    num::NonZeroUsize,
    process::{Command, ExitCode, Stdio},
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result, bail, ensure};
use build_tools::{
    build::build_for_tests,
    command::{exit_code, output},
    parallel::in_parallel,
};
use clap::{Parser, Subcommand};
use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};

use crate::{
    share::{Found, NOT_REACHED, Row, Selection, Share},
    trace::Trace,
};

/// Kill the proxy, or fail its system call, at each step that changes something, under load (as root).
///
/// Steps are system calls: of BPF, of netlink, on files. The proxy is killed before each (which is after the one before), and each
/// fails once with an error that the kernel might give. Afterwards no connect may have failed or seen a state that was replaced,
/// and the next start must complete what was interrupted. Prints each step with its outcomes.
#[derive(Parser)]
#[command(bin_name = "cargo xtask kill-matrix", max_term_width = 100, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    tracer: Option<Tracer>,
    #[command(flatten)]
    selection: Selection,
    /// How many nodes share the steps [default: as many as there are processors]
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// Take the proxy from the last build of the tests
    #[arg(long)]
    no_build: bool,
    /// Go through one node's share of the steps, and print what was found for the process that asks; the first is 0
    #[arg(long, value_name = "K", hide = true, requires = "shares")]
    share: Option<usize>,
    /// How many shares there are
    #[arg(long, value_name = "N", hide = true, requires = "share")]
    shares: Option<usize>,
}

#[derive(Subcommand)]
enum Tracer {
    /// Trace a program
    #[command(hide = true)]
    Trace(Trace),
    /// Be traced
    #[command(hide = true)]
    Traced {
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
}

/// One of so many interruptions may not be reached, as threads take turns.
const MAX_NOT_REACHED: usize = 10;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let traced = match &arguments.tracer {
        None => return exit_code(run(&arguments)),
        Some(Tracer::Trace(trace)) => trace.run(),
        Some(Tracer::Traced { command }) => trace::become_traced(command),
    };
    traced.unwrap_or_else(|error| exit_code(Err(error)))
}

fn run(arguments: &Arguments) -> Result<()> {
    if !cfg!(target_arch = "x86_64") {
        bail!("the tracer knows the registers of x86-64 only, and this machine is {}", env::consts::ARCH);
    }
    if let (Some(index), Some(of)) = (arguments.share, arguments.shares) {
        ensure!(index < of, "there is no share {index} of {of}: the first one is 0");
        let found = Share { index, of }.go_through(&arguments.selection)?;
        println!("{}", serde_json::to_string(&found)?);
        return Ok(());
    }
    if !arguments.no_build {
        build_for_tests()?;
    }
    let begin = Instant::now();
    let jobs = arguments.jobs.or_else(|| thread::available_parallelism().ok()).map_or(1, NonZeroUsize::get);
    let shares = (0..jobs).map(|index| Share { index, of: jobs });
    let Found { rows, problems, connects } = Found::join(in_parallel(jobs, shares, in_own_process)?);
    print(&rows);
    let outcomes: Vec<_> = rows.iter().flat_map(|it| &it.outcomes).collect();
    let not_reached = outcomes.iter().filter(|it| ***it == NOT_REACHED).count();
    println!(
        "{} interruptions, {not_reached} of them not reached; {connects} connects meanwhile, {} problems, {} s",
        outcomes.len(),
        problems.len(),
        begin.elapsed().as_secs()
    );
    if !problems.is_empty() {
        bail!("{} interruptions had consequences", problems.len());
    }
    if not_reached * MAX_NOT_REACHED > outcomes.len() {
        bail!("{not_reached} of {} interruptions were not reached: this says little", outcomes.len());
    }
    Ok(())
}

/// Goes through a share of the steps in a process of its own: a node takes the whole process.
fn in_own_process(Share { index, of }: Share) -> Result<Found> {
    let mut command = Command::new(env::current_exe().context("where this program is")?);
    command.args(env::args_os().skip(1)).args([format!("--share={index}"), format!("--shares={of}")]);
    command.stderr(Stdio::inherit());
    let found = output(&mut command)?;
    serde_json::from_str(&found).with_context(|| format!("share {index} of {of} found {found:?}"))
}

fn print(rows: &[Row]) {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header(["Scenario", "Step", "System call", "Killed before", "Failed"]);
    for row in rows {
        let cells = [row.scenario.to_string(), row.step.to_string(), row.call.clone()];
        table.add_row(cells.iter().chain(&row.outcomes));
    }
    println!("{table}");
}
