//! `cargo xtask soak`: random changes and failures of a node, under continuous load.

mod history;
mod load;
mod proxy;
mod random_cluster;
mod soak;

use std::{process::ExitCode, time::Duration};

use anyhow::{Context as _, Result};
use build_tools::{build::build_for_tests, command::exit_code, programs::test_programs};
use clap::Parser;
use tests::{Sandbox, TestNode};

/// Change, kill, upgrade and grow a node at random, under continuous load (as root).
///
/// Builds what is missing. Fails if a connect fails, an endpoint answers that no active state has, a long-lived socket
/// breaks, or something is leaked.
#[derive(Parser)]
#[command(bin_name = "cargo xtask soak", max_term_width = 100)]
struct Arguments {
    /// How long to run
    #[arg(long, value_name = "N", default_value_t = 3.0)]
    minutes: f64,
    /// Repeat the changes of the run that printed this seed
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    exit_code(run(&Arguments::parse()))
}

fn run(Arguments { minutes, seed }: &Arguments) -> Result<()> {
    let duration = Duration::try_from_secs_f64(minutes * 60.0).context("--minutes")?;
    // A missing program has been warned about.
    let _ = test_programs();
    build_for_tests()?;
    soak::soak(TestNode::enter(Sandbox::new("soak")?)?, duration, *seed)
}
