//! `cargo xtask fuzz`: libFuzzer on every reader of foreign bytes.
//! Invariant: the corpus in the repository is only changed if that is asked for.

use std::{fs, path::PathBuf, process::Command, thread};

use anyhow::{Context as _, Result, ensure};
use build_tools::{
    command::{cargo, run, status, workspace},
    create_folder,
    parallel::in_parallel,
    programs::install_subcommand,
};

/// The longest input, in bytes.
const MAX_INPUT: &str = "-max_len=8192";
/// The limits of an input, in seconds and MiB.
const LIMITS: [&str; 3] = ["-timeout=20", "-malloc_limit_mb=256", "-rss_limit_mb=2048"];

struct Outcome {
    target: String,
    /// How many inputs, and how many of them in a second.
    inputs: u64,
    rate: u64,
    /// How many inputs reached code that none had reached.
    new: u64,
    /// The most memory that the process had, in MiB.
    memory: u64,
    failed: bool,
}

/// Runs targets for so many minutes in all; without names, all of them.
pub(crate) fn fuzz(targets: &[String], minutes: u32, keep: bool) -> Result<()> {
    let all = names()?;
    let unknown: Vec<_> = targets.iter().filter(|it| !all.contains(it)).cloned().collect();
    ensure!(unknown.is_empty(), "no target {}; there are {}", unknown.join(", "), all.join(", "));
    let targets = if targets.is_empty() { all } else { targets.to_vec() };
    build()?;
    let workers = thread::available_parallelism().map_or(1, usize::from).min(targets.len());
    let seconds = (minutes as usize * 60 * workers / targets.len()).max(1);
    let mut outcomes = in_parallel(workers, targets, |target| {
        status("Fuzzing", &format!("{target} for {seconds} s"));
        search(&target, seconds)
    })?;
    outcomes.sort_by(|a, b| a.target.cmp(&b.target));
    print(&outcomes);
    if keep {
        outcomes.iter().filter(|it| !it.failed).try_for_each(|it| merge(&it.target))?;
    }
    let failed: Vec<_> = outcomes.iter().filter(|it| it.failed).map(|it| it.target.clone()).collect();
    ensure!(
        failed.is_empty(),
        "{} failed: `FUZZ_TARGET=NAME target/fuzz/*/release/fuzz_target INPUT` repeats an input of target/fuzz/artifacts",
        failed.join(", ")
    );
    Ok(())
}

/// The names of all targets: each has a corpus.
fn names() -> Result<Vec<String>> {
    let corpora = fs::read_dir(workspace().join("tests/fuzz/corpus")).context("tests/fuzz/corpus")?;
    let corpora = corpora.flatten().filter(|it| it.path().is_dir());
    let mut names: Vec<_> = corpora.filter_map(|it| it.file_name().into_string().ok()).collect();
    names.sort();
    Ok(names)
}

fn build() -> Result<()> {
    install_subcommand("cargo-fuzz")?;
    // Without a sanitizer: the targets have no unsafe code, and a stable compiler suffices. Without the optimizations of a
    // release that take longest, and with the names that a backtrace shows.
    run(cargo()
        .args(["fuzz", "build", "--sanitizer", "none", "--features", "libfuzzer", "--fuzz-dir"])
        .arg(workspace().join("tests/fuzz"))
        .arg("--target-dir")
        .arg(workspace().join("target/fuzz"))
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_STRIP", "none"))
}

/// Where a target's corpus is in the repository, and where that of all runs.
fn corpora(target: &str) -> [PathBuf; 2] {
    ["tests/fuzz/corpus", "target/fuzz/corpus"].map(|it| workspace().join(it).join(target))
}

fn program(target: &str) -> Result<Command> {
    let folders = fs::read_dir(workspace().join("target/fuzz")).context("target/fuzz")?;
    let mut binaries = folders.flatten().map(|it| it.path().join("release/fuzz_target"));
    let binary = binaries.find(|it| it.is_file()).context("cargo-fuzz has not built fuzz_target")?;
    let mut command = Command::new(binary);
    command.env("FUZZ_TARGET", target);
    Ok(command)
}

fn search(target: &str, seconds: usize) -> Result<Outcome> {
    let ([seeds, found], artifacts) =
        (corpora(target), workspace().join("target/fuzz/artifacts").join(target));
    create_folder(&found)?;
    create_folder(&artifacts)?;
    let output = program(target)?
        .args([MAX_INPUT, "-print_final_stats=1"])
        .args(LIMITS)
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .args([&found, &seeds])
        .env("RUST_BACKTRACE", "1")
        .output()
        .with_context(|| format!("cannot start {target}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    let log = artifacts.join("log");
    fs::write(&log, &*text).with_context(|| format!("cannot write {}", log.display()))?;
    let figure = |name: &str| {
        let line =
            text.lines().find_map(|it| it.strip_prefix("stat::")?.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|it| it.trim().parse().ok()).unwrap_or_default()
    };
    Ok(Outcome {
        target: target.to_owned(),
        inputs: figure("number_of_executed_units"),
        rate: figure("average_exec_per_sec"),
        new: figure("new_units_added"),
        memory: figure("peak_rss_mb"),
        failed: !output.status.success(),
    })
}

fn print(outcomes: &[Outcome]) {
    println!("{:14} {:>12} {:>10} {:>6} {:>8}  outcome", "target", "inputs", "inputs/s", "new", "memory");
    for Outcome { target, inputs, rate, new, memory, failed } in outcomes {
        let outcome = if *failed { "FAILED" } else { "ok" };
        println!("{target:14} {inputs:>12} {rate:>10} {new:>6} {memory:>4} MiB  {outcome}");
    }
    println!("{:14} {:>12}", "all", outcomes.iter().map(|it| it.inputs).sum::<u64>());
}

/// Copies the inputs that reach other code than those in the repository to them.
fn merge(target: &str) -> Result<()> {
    let [seeds, found] = corpora(target);
    run(program(target)?.args(["-merge=1", MAX_INPUT]).args([seeds, found]))
}
