//! `cargo xtask bench`: latency, CPU and memory, as figures next to their goals.
//! Invariant: every figure is measured, each case in a process of its own.

mod apply;
mod backends;
mod balance;
mod brain;
mod connect;
mod eject;
mod example;
mod figures;
mod file;
mod fleet;
mod kube;
mod map_memory;
mod nft;
mod objects;
mod outside;
mod outside_cluster;
mod outside_driver;
mod outside_packets;
mod outside_program;
mod page;
mod plot;
mod program_stats;
mod proxies;
mod proxy_command;
mod proxy_figures;
mod record;
mod report;
mod scale;
mod subject;

use std::process::ExitCode;

use build_tools::command::exit_code;
use clap::{Parser, Subcommand};

/// Measure latency, CPU and memory, and print the figures next to their goals.
#[derive(Parser)]
#[command(bin_name = "cargo xtask bench", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    #[command(flatten)]
    Measure(subject::Subject),
    /// Record the figures of all subjects in docs/figures, and write docs/performance.md with plots of them (as root)
    Report(report::ReportArguments),
}

fn main() -> ExitCode {
    exit_code(match Arguments::parse().task {
        Task::Report(it) => report::report(it),
        Task::Measure(subject) => subject.measure().and_then(|it| {
            it.print();
            it.check()
        }),
    })
}
