//! `cargo xtask soak`: random changes and failures of a node, under continuous load.

mod attack;
mod history;
mod hostile;
mod load;
mod proxy;
mod random_cluster;
mod soak;

use std::{net::Ipv4Addr, process::ExitCode, time::Duration};

use anyhow::{Context as _, Result};
use build_tools::{build::build_for_tests, command::exit_code, programs::test_programs};
use clap::Parser;
use tests::{Sandbox, TestNode};

use crate::attack::Attack;

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
    /// Attack all along, from processes without capabilities in network namespaces and cgroups of their own
    ///
    /// They open sockets by the thousand, send from sources that are not theirs, and occupy the health port. Everybody
    /// else must notice nothing, every probe be answered, and the memory that is charged to the agent stay bounded.
    #[arg(long)]
    hostile: bool,
    /// Be an attacker
    #[arg(long, hide = true, requires = "gateway")]
    attack: Option<Attack>,
    #[arg(long, hide = true)]
    gateway: Option<Ipv4Addr>,
}

fn main() -> ExitCode {
    exit_code(run(&Arguments::parse()))
}

fn run(Arguments { minutes, seed, hostile, attack, gateway }: &Arguments) -> Result<()> {
    if let (Some(attack), Some(gateway)) = (attack, gateway) {
        return attack.perform(*gateway);
    }
    let duration = Duration::try_from_secs_f64(minutes * 60.0).context("--minutes")?;
    test_programs();
    build_for_tests()?;
    soak::soak(TestNode::enter(Sandbox::new("soak")?)?, duration, *seed, *hostile)
}
