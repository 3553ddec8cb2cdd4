//! `cargo xtask test`: every test there is.
//! The one rule: what was skipped is said at the end; nothing is silently green.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Result;

use crate::{
    build::build_for_tests,
    command::{cargo, run, say, workspace},
    setup, soak,
};

/// The programs that end-to-end tests call, and the packages that bring them.
const TOOLS: [(&str, &str); 4] =
    [("ip", "iproute2"), ("nft", "nftables"), ("setpriv", "util-linux"), ("unshare", "util-linux")];

/// How long the soak among the tests lasts.
const SOAK: Duration = Duration::from_secs(20);

/// Finds or fetches the programs that end-to-end tests call.
pub(crate) fn tools() -> Vec<PathBuf> {
    let found = TOOLS.iter().map(|(program, package)| setup::tool(program, package));
    // Tests say themselves that they are skipped if one could not be had.
    found.filter_map(|it| it.inspect_err(|error| say("Warning", &format!("{error:#}"))).ok()).collect()
}

/// Builds everything and runs the tests whose names contain `filter`.
pub(crate) fn test(filter: Option<&str>) -> Result<()> {
    tools();
    build_for_tests()?;

    let target = workspace().join("target");
    let mut examples = cargo();
    // A test runs them, but cargo builds them only where it is told nothing of what to test.
    examples.args(["build", "--workspace", "--exclude", "proxy-ebpf", "--examples", "--target-dir"]);
    run(examples.arg(&target))?;
    let skipped = target.join("skipped-tests");
    // There is none after a run without skipped tests.
    let _ = fs::remove_file(&skipped);
    let result = run(cargo()
        .args(["test", "--workspace", "--exclude", "proxy-ebpf", "--no-fail-fast", "--target-dir"])
        .arg(&target)
        .args(filter)
        // One at a time: a process, with all its threads, is in one cgroup.
        .args(["--", "--test-threads=1"])
        .env(tests::sandbox::SKIPPED_TESTS_FILE, &skipped));

    let soaked = if filter.is_none_or(|it| "soak".contains(it)) { soak(&skipped) } else { Ok(()) };

    let skipped = fs::read_to_string(&skipped).unwrap_or_default();
    if !skipped.is_empty() {
        println!("\n{skipped}{} tests were skipped, for the reasons above.", skipped.lines().count());
    }
    result.and(soaked)
}

/// A short soak, or the reasons why there is none, among the skipped tests.
fn soak(skipped: &Path) -> Result<()> {
    if let Err(missing) = tests::requirements() {
        let reasons: Vec<_> = missing.iter().map(ToString::to_string).collect();
        let line = format!("skipped: soak: {}\n", reasons.join("; "));
        let mut file = fs::OpenOptions::new().create(true).append(true).open(skipped)?;
        return Ok(file.write_all(line.as_bytes())?);
    }
    soak::soak(SOAK, None)
}
