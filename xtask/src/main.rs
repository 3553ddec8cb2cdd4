//! `cargo xtask`: every task of a developer or of CI.
//! Invariant: a new machine needs no other command. The larger tasks are crates of their own, which xtask starts without
//! depending on them: `cargo xtask setup` compiles neither tests nor benchmarks.

mod archive;
mod contract;
mod dist;
mod fuzz;
mod image;
mod interop;
mod lint;
mod mutants;
mod release;
mod sbom;
mod test;

use std::{ffi::OsString, os::unix::process::CommandExt as _, path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result};
use build_tools::{
    build,
    command::{cargo_into_target, exit_code, status},
    machine::Machine,
    toolchain::Toolchain,
};
use clap::{Args, Parser, Subcommand};

/// Builds, demonstrates and tests kube-proxy-ebpf.
#[derive(Parser)]
#[command(bin_name = "cargo xtask", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what builds the kernel object, where it is missing (other tasks do so, too).
    ///
    /// That is `bpf-linker`, and a Rust compiler with its sources: the current one if it has them or if
    /// `rustup component add rust-src` installs them, otherwise Debian's.
    Setup,
    /// Build only the kernel object, target/kernel/kube-proxy-ebpf.o.
    BuildEbpf,
    /// Build the binary with the kernel object inside, target/{debug,release}/kube-proxy-ebpf.
    Build {
        /// With optimizations, for a node, which needs no library for it
        #[arg(long)]
        release: bool,
        /// With lines of log in the programs, which the process logs up to its own level when it starts
        #[arg(long, conflicts_with = "release")]
        log: bool,
    },
    /// Show the proxy at work: a node in a sandbox, real pods, real connections; no cluster needed (as root, 15 s).
    #[command(disable_help_flag = true)]
    Demo(Forwarded),
    /// Run every test: unit, property, scenario and end-to-end tests against the kernel (as root).
    ///
    /// Builds what is missing. End-to-end tests that this machine cannot run are skipped and listed.
    Test(test::Options),
    /// Check the format, lints, the product for other machines, the dependencies and the package of the contract.
    ///
    /// Everything that CI checks without running the product; what is missing for it is installed.
    Lint,
    /// Run the end-to-end tests on other kernels, in virtual machines, and on this machine's own (as root).
    #[command(disable_help_flag = true)]
    Vmtest(Forwarded),
    /// Change, kill, upgrade and grow a node at random, under continuous load (as root).
    #[command(disable_help_flag = true)]
    Soak(Forwarded),
    /// Kill the proxy, or fail its system call, at each step that changes something, under load (as root).
    #[command(disable_help_flag = true)]
    KillMatrix(Forwarded),
    /// Simulate the control path from seeds: API server, brains and agents in one thread, with every fault between them.
    #[command(disable_help_flag = true)]
    Simulate(Forwarded),
    /// Measure latency, CPU and memory, and print the figures next to their goals, or write the page of figures with plots.
    #[command(disable_help_flag = true)]
    Bench(Forwarded),
    /// Search for inputs that violate an invariant of whatever reads what others have written, guided by coverage.
    ///
    /// The targets share the time, and all processors work; at the end a table says what each has done. A panic, an input that
    /// takes longer than 20 s, an allocation of more than 256 MiB and a process of more than 2 GiB are failures. The test
    /// suite checks the same invariants with the corpus and a fixed number of mutations. Installs cargo-fuzz if it is missing;
    /// new inputs go to target/fuzz/corpus, failing ones to target/fuzz/artifacts.
    Fuzz {
        /// Targets of tests/fuzz, such as `parser`, `wire` or `brain`; all by default
        #[arg(value_name = "TARGET")]
        targets: Vec<String>,
        /// How long to search, in all
        #[arg(long, default_value_t = 15)]
        minutes: u32,
        /// Copy the new inputs that reach other code to tests/fuzz/corpus afterwards
        #[arg(long)]
        keep: bool,
    },
    /// Change the pure code in small ways, one at a time, and list the changes that no test of its crate notices.
    ///
    /// It is that of the crates proxy-common, model, wire and brain, and the layout of the tables in datapath-ebpf. What is left
    /// out, and why, is in .cargo/mutants.toml. Installs cargo-mutants if it is missing; the results are in target/mutants.
    Mutants {
        /// One of these crates, or `layout`; all by default
        #[arg(value_name = "NAME")]
        subject: Option<String>,
        /// Only the k-th of n parts, as in 0/6
        #[arg(long, value_name = "K/N")]
        shard: Option<String>,
    },
    /// Build the files of a release in target/dist: archives, the image, manifests, bills of materials, provenance, checksums.
    ///
    /// An archive holds the binary, which needs no library, the license, the documents and the manifests. The image is an
    /// archive in the format of the OCI for all machines; no container tool is needed. The bills of materials (CycloneDX)
    /// list every crate in the binary, the provenance (in-toto, unsigned) what it was built from. The same commit and
    /// compiler give the same bytes in any folder.
    Dist {
        /// Only for this machine; may be repeated
        #[arg(long, value_enum, default_values = ["x86_64", "aarch64"])]
        arch: Vec<Machine>,
        /// Build the files of the git index in two other folders, and compare the results, instead (half an hour)
        #[arg(long)]
        check_reproducible: bool,
    },
    /// Check that this commit can be released, build the files, try the upgrade, and print what to do next.
    ///
    /// Nothing is published: no tag is made and nothing is pushed. A version in Cargo.toml, CHANGELOG.md or the manifests
    /// that differs from the others is an error, as is a file that is not committed.
    Release {
        /// Build even if this commit cannot be released, and list the reasons at the end
        #[arg(long)]
        dry_run: bool,
        /// The archive of the previous release for this machine: a node is upgraded from it and back, under load (as root)
        #[arg(long, value_name = "ARCHIVE")]
        previous: Option<PathBuf>,
    },
    /// Take the pictures of the page for people again, docs/pictures (as root, two minutes; Chromium is installed if missing).
    Pictures,
    /// Write the references of flags and metrics again, docs/flags.md and docs/metrics.md, from the code.
    Docs,
    /// Write completions for bash, zsh and fish, and man pages, to target/shell-files; the archives of `dist` have them, too.
    Completions,
    /// Run Kubernetes' conformance tests in a kind cluster without kube-proxy (hours; needs docker and the Internet).
    #[command(disable_help_flag = true)]
    Conformance(Forwarded),
    /// Build the backends in Rust, Python and Go, and ask them where connections go (backend-conformance).
    ///
    /// What their languages need is fetched: from PyPI, and as root from Debian or Ubuntu. Arguments are those of
    /// `backend-conformance`, such as --filter. A language that this machine cannot have is skipped with the reason.
    Interop(Forwarded),
    /// Check the package of the contract: its .proto files with buf, `cargo package`, and its documentation.
    ///
    /// buf is installed with npm if it is missing; where it cannot be, its checks are skipped with the reason.
    Contract,
    /// Check the licenses, sources and known vulnerabilities of the dependencies with cargo-deny, which is installed if missing.
    ///
    /// The database of vulnerabilities is fetched; where it cannot be, that check is skipped and says so.
    Licenses,
}

/// Arguments for a task that is a crate of its own.
#[derive(Args)]
struct Forwarded {
    /// `--help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

fn main() -> ExitCode {
    exit_code(perform(Arguments::parse().task))
}

fn perform(task: Task) -> Result<()> {
    match task {
        Task::Setup => {
            let tools = Toolchain::find_or_install()?;
            status("Compiler", &tools.rustc.display().to_string());
            status("Linker", &tools.linker.display().to_string());
            status("Ready", "the kernel object can be built");
            Ok(())
        }
        Task::BuildEbpf => build::build_ebpf(),
        Task::Build { release, log } => {
            let binary = if log { build::build_with_log()? } else { build::build(release)? };
            status("Ready", &binary.display().to_string());
            Ok(())
        }
        Task::Test(options) => test::test(&options),
        Task::Lint => lint::lint(),
        Task::Pictures => test::pictures(),
        Task::Docs => test::documents(),
        Task::Completions => {
            status("Ready", &dist::shell_files()?.display().to_string());
            Ok(())
        }
        Task::Fuzz { targets, minutes, keep } => fuzz::fuzz(&targets, minutes, keep),
        Task::Mutants { subject, shard } => mutants::mutants(subject.as_deref(), shard.as_deref()),
        Task::Dist { check_reproducible: true, arch } => dist::check_reproducible(&arch),
        Task::Dist { arch, .. } => dist::dist(&arch).map(drop),
        Task::Release { dry_run, previous } => release::release(dry_run, previous.as_deref()),
        Task::Interop(it) => interop::interop(&it.arguments),
        Task::Contract => contract::contract().map(|reason| report_skipped("buf", reason)),
        Task::Licenses => lint::licenses().map(|reason| report_skipped("advisories", reason)),
        Task::Demo(it) => become_task("demo", &[], &it),
        Task::Vmtest(it) => become_task("vmtest", &[], &it),
        Task::Soak(it) => become_task("soak", &[], &it),
        Task::KillMatrix(it) => become_task("kill-matrix", &[], &it),
        Task::Simulate(it) => become_task("simulation", &["--profile", "simulation"], &it),
        Task::Bench(it) => become_task("bench", &[], &it),
        Task::Conformance(it) => become_task("conformance", &[], &it),
    }
}

fn report_skipped(what: &str, reason: Option<String>) {
    if let Some(reason) = reason {
        status("Skipped", &format!("{what}: {reason}"));
    }
}

/// Builds the crate of a task and replaces this process with it: signals and the exit code are the task's own.
fn become_task(package: &str, arguments: &[&str], forwarded: &Forwarded) -> Result<()> {
    let mut command = cargo_into_target("run");
    command.args(["--package", package]).args(arguments);
    Err(command.arg("--").args(&forwarded.arguments).exec()).context("cannot start cargo")
}
