//! `cargo xtask bench`: latency, CPU and memory, as figures next to their goals.
//! Invariant: every figure is measured, each case in a process of its own.

mod apply;
mod balance;
mod brain;
mod connect;
mod eject;
mod example;
mod file;
mod fleet;
mod kube;
mod nft;
mod program_stats;
mod report;

use std::process::ExitCode;

use build_tools::command::exit_code;
use clap::{Parser, Subcommand};

/// Measure latency, CPU and memory, and print the figures next to their goals.
#[derive(Parser)]
#[command(bin_name = "cargo xtask bench", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(Clone, Debug, Subcommand)]
enum Subject {
    /// From a received state until every program uses it; a start; and the memory for both (as root)
    Apply,
    /// Time of connections to two fast endpoints and a slow one, at random and by least connections; the share of a new
    /// endpoint (as root)
    Balance,
    /// CPU and memory of the brain, from cluster states to node states
    Brain,
    /// A connect through a Service's address compared with one to an endpoint, and run times of the programs (as root)
    Connect,
    /// A node with 30 of 100 endpoints dies under 2,000 connects per second, with passive health and without (as root)
    Eject,
    /// A folder of many manifests, and one large file: time to read, CPU at rest and of a change, memory (as root)
    File,
    /// A brain that 5,000 nodes follow: time until all have a change, CPU, memory and bytes, also of its restart
    Fleet(fleet::FleetArguments),
    /// Memory and CPU of `run` with an API server, at 10,000 Services and 500 changes per second (as root)
    Kube,
    /// The nftables path: loads, changes and restarts at 1,000 and 10,000 Services (as root)
    Nft,
}

fn main() -> ExitCode {
    exit_code(match Arguments::parse().subject {
        Subject::Apply => apply::bench(),
        Subject::Balance => balance::bench(),
        Subject::Brain => brain::bench(),
        Subject::Connect => connect::bench(),
        Subject::Eject => eject::bench(),
        Subject::File => file::bench(),
        Subject::Fleet(it) => fleet::bench(it),
        Subject::Kube => kube::bench(),
        Subject::Nft => nft::bench(),
    })
}
