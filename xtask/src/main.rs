//! `cargo xtask`: everything a person or CI does with this repository.
//! The one rule: a fresh machine needs no command besides these.

mod build;
mod command;
mod setup;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Builds, demonstrates and tests kube-proxy-ebpf.
#[derive(Parser)]
#[command(bin_name = "cargo xtask", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Get what the kernel side is built with, where it is missing (done by the other tasks too).
    ///
    /// That is `bpf-linker`, and a Rust compiler together with its sources: the one you use if it has them, or gets
    /// them by `rustup component add rust-src`, else Debian's.
    Setup,
    /// Build only the kernel side, to target/kernel/kube-proxy-ebpf.o.
    BuildEbpf,
    /// Build the binary with the kernel object inside, to target/{debug,release}/kube-proxy-ebpf.
    Build {
        /// Optimised, for a node.
        #[arg(long)]
        release: bool,
    },
}

fn main() -> Result<()> {
    match Arguments::parse().task {
        Task::Setup => {
            let tools = setup::setup()?;
            command::say("Compiler", &tools.rustc.display().to_string());
            command::say("Linker", &tools.linker.display().to_string());
            command::say("Ready", "the kernel side can be built");
        }
        Task::BuildEbpf => build::build_ebpf(&[build::Variant::Product])?,
        Task::Build { release } => {
            let binary = build::build(release)?;
            command::say("Ready", &binary.display().to_string());
        }
    }
    Ok(())
}
