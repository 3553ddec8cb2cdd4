//! `cargo xtask bench`: latency, CPU and memory, as figures next to their goals.
//! Invariant: every figure is measured, each case in a process of its own.

mod apply;
mod balance;
mod brain;
mod connect;
mod eject;
mod example;
mod figures;
mod file;
mod fleet;
mod kube;
mod nft;
mod page;
mod plot;
mod program_stats;
mod proxies;
mod record;
mod report;

use std::process::ExitCode;

use anyhow::{Result, bail};
use build_tools::command::exit_code;
use clap::{Parser, Subcommand};

use figures::Figures;

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
    /// The nftables path: loads, changes and restarts at 100 to 30,000 Services (as root)
    Nft,
    /// Record the figures of all subjects in docs/figures, and write docs/performance.md with plots of them (as root)
    Report(report::ReportArguments),
}

/// The subjects of a report.
const SUBJECTS: [&str; 9] = ["apply", "balance", "brain", "connect", "eject", "file", "fleet", "kube", "nft"];

impl Subject {
    /// A subject with its defaults.
    fn named(name: &str) -> Result<Self> {
        Ok(Arguments::try_parse_from(["bench", name])?.subject)
    }

    fn measure(self) -> Result<Figures> {
        match self {
            Self::Apply => apply::bench(),
            Self::Balance => balance::bench(),
            Self::Brain => brain::bench(),
            Self::Connect => connect::bench(),
            Self::Eject => eject::bench(),
            Self::File => file::bench(),
            Self::Fleet(it) => fleet::bench(it),
            Self::Kube => kube::bench(),
            Self::Nft => nft::bench(),
            Self::Report(_) => bail!("a report is no subject of a report"),
        }
    }
}

fn main() -> ExitCode {
    exit_code(match Arguments::parse().subject {
        Subject::Report(it) => report::report(it),
        subject => subject.measure().and_then(|it| {
            it.print();
            it.check()
        }),
    })
}
