//! `cargo xtask vmtest`: the end-to-end tests on one kernel after the other.
//! Invariant: every cell of the matrix is a test that ran, or the reason why it could not.

mod console;
mod initramfs;
mod kernel_table;
mod kernels;
mod plan;
mod report;
mod runner;
mod system;
mod virtual_machine;

use std::{fs, path::PathBuf, process::ExitCode, thread, time::Instant};

use anyhow::{Context as _, Result, bail};
use build_tools::{
    command::{exit_code, status, workspace},
    machine::Machine,
    parallel::in_parallel,
    test_suite::Outcome,
};
use clap::Parser;

use crate::{
    kernel_table::KernelTable,
    plan::{Event, HOST, TestPlan},
    runner::Runner,
};

/// The matrix: `own` is this machine's kernel, a number without a dot is the newest of its major version.
const KERNELS: [&str; 6] = [HOST, "5.10", "5.15", "6.1", "6.12", "7"];
/// Of Ubuntu, whose packages for other machines than x86-64 are in another archive.
const UBUNTUS: &str = "5.15";

/// Run the end-to-end tests on other kernels, in virtual machines, and on this machine's own (as root).
///
/// Fetches kernels from the packages of Debian and Ubuntu, and QEMU and busybox, where they are missing; builds what is
/// missing. Prints each test that ends, and a table of kernels and tests; target/vmtest has the tests that have begun.
/// tests/KERNELS.md lists what older kernels lack. Without hardware virtualization (KVM) a kernel takes up to an hour.
#[derive(Parser)]
#[command(bin_name = "cargo xtask vmtest", max_term_width = 100)]
struct Arguments {
    /// Only these kernels and tests: `own`, or a series that has a package, such as 6.1; any other word is part of a
    /// test's name, as in `vmtest 5.10 6.1 sockets`
    #[arg(value_name = "KERNEL|TEST")]
    only: Vec<String>,
    /// How often each kernel is booted
    #[arg(long, value_name = "N", default_value_t = 1)]
    repeat: usize,
    /// The machine whose kernels are booted, if it is not this one; it is emulated
    #[arg(long, value_enum)]
    arch: Option<Machine>,
    /// Run a plan of tests inside a virtual machine
    #[arg(long, hide = true)]
    guest: Option<PathBuf>,
}

fn main() -> ExitCode {
    let Arguments { only, repeat, arch, guest } = Arguments::parse();
    exit_code(guest.map_or_else(|| run(&only, repeat, arch), |plan| TestPlan::run_file(&plan)))
}

/// Runs the tests `repeat` times on each kernel: on the whole matrix if `only` names none.
fn run(only: &[String], repeat: usize, arch: Option<Machine>) -> Result<()> {
    let begin = Instant::now();
    let own = Machine::own()?;
    let machine = arch.unwrap_or(own);
    let can_run = |it: &&str| match *it {
        HOST => machine == own,
        UBUNTUS => machine == Machine::X86_64,
        _ => true,
    };
    let matrix: Vec<_> = KERNELS.iter().filter(|it| can_run(it)).map(|&it| it.to_owned()).collect();
    let (kernels, filters): (Vec<_>, Vec<_>) = only.iter().cloned().partition(|it| is_kernel(it));
    let kernels = if kernels.is_empty() { &matrix[..] } else { &kernels };
    if machine != own && kernels.iter().any(|it| it == HOST) {
        bail!("`{HOST}` is this machine's kernel, which is not one of {}", machine.name());
    }
    let table = fs::read_to_string(workspace().join(kernel_table::FILE))
        .with_context(|| format!("cannot read {}", kernel_table::FILE))?;
    let table = KernelTable::parse(&table)?;
    let runner = Runner::prepare(&table, machine, kernels, &filters)?;

    let numbered = (0..repeat).flat_map(|_| kernels.iter()).enumerate();
    let runs = in_parallel(lanes_of_this_machine(), numbered, |(number, series)| {
        Ok(runner.run(number, series, |event| print(series, event)))
    })?;

    let tests: Vec<_> = runner.plan.tests.iter().map(|it| it.name.clone()).collect();
    match report::print(&tests, &runs, begin.elapsed()) {
        0 => Ok(()),
        failures => bail!("{failures} failures, see above"),
    }
}

/// Whether a word of the command line is a kernel, and not part of a test's name.
fn is_kernel(word: &str) -> bool {
    word == HOST || word.starts_with(|it: char| it.is_ascii_digit())
}

/// How many kernels are tested at a time: each virtual machine has two CPUs.
fn lanes_of_this_machine() -> usize {
    thread::available_parallelism().map_or(1, |it| it.get() / 2).max(1)
}

fn print(series: &str, event: &Event) {
    match event {
        Event::Ready { release, .. } => status("Booted", release),
        Event::Ended { test, outcome, .. } => {
            let word = match outcome {
                Outcome::Passed => "ok",
                Outcome::Skipped(_) => "skipped",
                Outcome::Failed(_) => "FAILED",
            };
            status(word, &format!("{test} on {series}"));
        }
        Event::Started { .. } | Event::Done => {}
    }
}
