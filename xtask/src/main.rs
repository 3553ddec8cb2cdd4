//! `cargo xtask`: everything a person or CI does with this repository.
//! The one rule: a fresh machine needs no command besides these.

mod bench;
mod build;
mod command;
mod conformance;
mod container;
mod demo;
mod dist;
mod fuzz;
mod licences;
mod setup;
mod soak;
mod status;
mod test;
mod vmtest;

use std::{net::SocketAddr, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context as _, Result};
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
    /// Show it at work: a node in a sandbox, real pods, real connections; no cluster needed (as root, about 15 s).
    ///
    /// Builds what is missing first. Fails if one connect fails or one answer comes from the wrong endpoint.
    Demo {
        /// Leave the sandbox up, and say how to enter it.
        #[arg(long)]
        keep: bool,
        /// Only take down what `--keep` left up.
        #[arg(long, conflicts_with = "keep")]
        clean: bool,
    },
    /// Run every test: unit, property, scenario, and end to end against the kernel (as root).
    ///
    /// Builds what is missing first. Where the machine lacks something, end-to-end tests are skipped and counted.
    Test {
        /// Only tests whose names contain this.
        filter: Option<String>,
    },
    /// Run the end-to-end tests on other kernels, in virtual machines, and on the machine's own (as root).
    ///
    /// Fetches kernels from the packages of Debian and Ubuntu, and QEMU and busybox, where they are missing; builds what
    /// is missing. Prints kernel × test. tests/KERNELS.md says what a kernel may lack. Without hardware help (KVM) a
    /// kernel takes the better part of an hour.
    Vmtest {
        /// Only these kernels and tests: `own`, or a series that there is a package of, such as 6.1; anything else is a
        /// part of tests' names, as in `vmtest 5.10 6.1 sockets`.
        #[arg(value_name = "KERNEL|TEST")]
        only: Vec<String>,
        /// Boot each kernel so many times.
        #[arg(long, value_name = "N", default_value_t = 1)]
        repeat: usize,
    },
    /// Change, kill, upgrade and grow a node at random, under load that never pauses (as root).
    ///
    /// Builds what is missing first. Fails if one connect fails, one answer comes from an endpoint that did not serve, one
    /// lasting socket breaks, or anything is left over.
    Soak {
        /// How long.
        #[arg(long, value_name = "N", default_value_t = 3.0)]
        minutes: f64,
        /// What happens, and in which order; a run says its own.
        #[arg(long, value_name = "S")]
        seed: Option<u64>,
    },
    /// Measure what things cost, and print the figures beside the goals.
    Bench {
        /// What to measure.
        subject: bench::Subject,
    },
    /// Look for bytes that break a law (a file, a message, the history of a cluster), guided by coverage.
    ///
    /// The test suite does the same with the corpus and a fixed number of mutations. Installs cargo-fuzz if it is missing;
    /// new inputs go to tests/fuzz/corpus, those that break a law to tests/fuzz/artifacts.
    Fuzz {
        /// `parser`, `wire`, `facts` or `brain`.
        target: String,
        /// For how long.
        #[arg(long, default_value_t = 60)]
        seconds: u32,
    },
    /// Make what is handed to others, in target/dist: an archive with its checksum, and the image.
    ///
    /// The archive holds the binary, the licence and the manifests, and depends on their contents alone. The image is
    /// built where a container tool works: docker, podman, nerdctl or buildah, the first of them. What cannot be made
    /// here is named at the end, with the reason; a build that fails is an error.
    Dist {
        /// The tool that builds the image; an error if it cannot
        #[arg(long, value_enum)]
        container_tool: Option<container::Tool>,
        /// Build no image
        #[arg(long, conflicts_with = "container_tool")]
        no_image: bool,
    },
    /// Run upstream's end-to-end tests in a cluster of kind without kube-proxy (hours; needs docker and the Internet).
    ///
    /// Makes a cluster of three nodes, builds the image and brings it there, deploys the overlay `kind`, runs the
    /// conformance tests and those of the network, and removes the cluster. What is left out, and why, is in
    /// deploy/conformance/skip.yaml. If something fails, logs and each node's `dump` are in target/conformance.
    Conformance(conformance::Options),
    /// Check the licences and sources of the dependencies, and advisories as far as that works offline.
    Licences,
    /// Run a plan of tests inside a virtual machine.
    #[command(hide = true)]
    Guest { plan: PathBuf },
    /// Be a pod of the demo.
    #[command(hide = true)]
    Pod {
        #[arg(long)]
        name: String,
        addresses: Vec<SocketAddr>,
    },
}

fn main() -> ExitCode {
    match perform(Arguments::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<demo::Interrupted>() => {
            eprintln!("\n{error}");
            ExitCode::from(demo::Interrupted::EXIT_CODE)
        }
        Err(error) => {
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn perform(task: Task) -> Result<()> {
    match task {
        Task::Setup => {
            let tools = setup::setup()?;
            command::say("Compiler", &tools.rustc.display().to_string());
            command::say("Linker", &tools.linker.display().to_string());
            command::say("Ready", "the kernel side can be built");
            Ok(())
        }
        Task::BuildEbpf => build::build_ebpf(&[build::Variant::Product]),
        Task::Build { release } => {
            let binary = build::build(release)?;
            command::say("Ready", &binary.display().to_string());
            Ok(())
        }
        Task::Demo { clean: true, .. } => demo::clean(),
        Task::Demo { keep, .. } => demo::run(keep),
        Task::Test { filter } => test::test(filter.as_deref()),
        Task::Vmtest { only, repeat } => vmtest::vmtest(&only, repeat),
        Task::Soak { minutes, seed } => {
            let duration = Duration::try_from_secs_f64(minutes * 60.0).context("--minutes")?;
            test::tools();
            build::build_for_tests()?;
            soak::soak(duration, seed)
        }
        Task::Guest { plan } => vmtest::guest(&plan),
        Task::Bench { subject } => bench::bench(subject),
        Task::Fuzz { target, seconds } => fuzz::fuzz(&target, seconds),
        Task::Dist { container_tool, no_image } => dist::dist(container_tool, no_image),
        Task::Conformance(options) => conformance::conformance(&options),
        Task::Licences => licences::licences(),
        Task::Pod { name, addresses } => demo::serve(&name, &addresses),
    }
}
