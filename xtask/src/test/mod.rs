//! `cargo xtask test`: every test of the workspace.
//! Invariant: skipped tests are listed at the end with their reasons.

mod report;
mod schedule;

use std::{
    collections::{BTreeMap, hash_map::DefaultHasher},
    hash::Hasher as _,
    hint::black_box,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use build_tools::{
    TIMEOUT_FACTOR,
    build::build_for_tests,
    command::{cargo_into_target, run, status},
    other_systems::build_for_other_systems,
    programs::{install_font, promtool, test_programs},
    test_suite::{Outcome, TestBinary, build_test_binaries},
};
use clap::Args;

use self::schedule::{Ended, Schedule};

/// The packages whose tests run the product in a sandbox, or play many random histories.
const SLOW: [&str; 6] = ["tests", "kill-matrix", "soak", "backend-conformance", "fuzz", "simulation"];
/// After this time a test hangs, on a machine of ordinary speed.
const LIMIT: Duration = Duration::from_secs(600);

/// How long [`time_factor`] takes on a machine of ordinary speed that does nothing else (x86-64, 3 GHz, a debug build).
const REFERENCE: Duration = Duration::from_millis(100);
/// How many words [`time_factor`] hashes.
const WORDS: u64 = 1_000_000;
/// The highest [`time_factor`]: a machine that is slower hangs.
const MAX_FACTOR: f64 = 20.0;

/// Which tests run, and how.
#[derive(Args)]
pub(crate) struct Options {
    /// Only tests whose names contain this
    filter: Option<String>,
    /// Only tests that need neither a sandbox nor root, without samples of random histories; builds no kernel object
    #[arg(long)]
    fast: bool,
    /// The seed of an earlier run, for its order; random by default
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// How many tests run at a time; by default two for each processor, since most tests wait most of the time
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
}

pub(crate) fn test(options: &Options) -> Result<()> {
    let begin = Instant::now();
    let mut tests = Vec::new();
    let filter = options.filter.as_deref().unwrap_or_default();
    for binary in build(options.fast)? {
        tests.extend(binary.tests()?.into_iter().filter(|it| it.title().contains(filter)));
    }
    if tests.is_empty() {
        bail!("no test's name contains {filter:?}");
    }

    let processors = thread::available_parallelism().map_or(1, usize::from);
    let jobs = options.jobs.unwrap_or(processors * 2).max(1);
    let factor = time_factor(processors);
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..1 << 32));
    status("Built", &format!("{} tests, in {:.0} s", tests.len(), begin.elapsed().as_secs_f64()));
    status(
        "Running",
        &format!("{jobs} at a time, limits of time x {factor:.1}; `--seed {seed}` repeats the order"),
    );
    let schedule = Schedule {
        seed,
        jobs,
        environment: BTreeMap::from([(TIMEOUT_FACTOR.to_owned(), format!("{factor:.2}"))]),
        limit: LIMIT.mul_f64(factor),
    };
    let running = Instant::now();
    let (all, mut number) = (tests.len(), 0);
    let mut ended = schedule.run(tests, |it| {
        number += 1;
        report::print_one(number, all, it);
    })?;
    report::print(&mut ended, running.elapsed());
    let failed = ended.iter().filter(|it: &&Ended| matches!(it.outcome, Outcome::Failed(_))).count();
    if failed > 0 {
        bail!("{failed} tests failed; `cargo xtask test --seed {seed}` runs them in the same order");
    }
    if options.filter.is_none() { run(cargo_test().arg("--doc")) } else { Ok(()) }
}

/// By how much limits of time are multiplied, so that only hangs exceed them: how much longer some work takes here, at least 1.
fn time_factor(processors: usize) -> f64 {
    let work = || {
        (0..WORDS).fold(DefaultHasher::new(), |mut hasher, it| {
            hasher.write_u64(it);
            hasher
        })
    };
    let begin = Instant::now();
    thread::scope(|scope| {
        for _ in 0..processors {
            scope.spawn(|| black_box(work().finish()));
        }
    });
    (begin.elapsed().as_secs_f64() / REFERENCE.as_secs_f64()).clamp(1.0, MAX_FACTOR)
}

/// Builds the tests and what they run; returns the binaries.
fn build(fast: bool) -> Result<Vec<TestBinary>> {
    if !fast {
        test_programs();
        if let Err(error) = promtool() {
            status("Warning", &format!("{error:#}"));
        }
        build_for_tests()?;
        build_for_other_systems()?;
    }
    let mut binaries = build_test_binaries(cargo_test())?;
    binaries.retain(|it| !fast || !SLOW.contains(&it.package()));
    Ok(binaries)
}

/// `cargo test` of the workspace, without the kernel's side.
fn cargo_test() -> Command {
    let mut command = cargo_into_target("test");
    command.args(["--workspace", "--exclude", "proxy-ebpf"]);
    command
}

pub(crate) fn pictures() -> Result<()> {
    test_programs();
    install_font()?;
    build_for_tests()?;
    run(cargo_test().args(["--test", "ui", "the_pictures_of_the_page", "--", "--ignored", "--nocapture"]))?;
    status("Ready", "docs/pictures");
    Ok(())
}

/// Writes the generated parts of the documents: tests write what they compare otherwise.
pub(crate) fn documents() -> Result<()> {
    run(cargo_into_target("test")
        .args(["--package", "admin", "--package", "kube-proxy-ebpf", "--lib", "--bins", "is_generated"])
        .env("KUBE_PROXY_EBPF_UPDATE_DOCUMENTS", "1"))?;
    status("Ready", "docs/flags.md, docs/metrics.md");
    Ok(())
}
