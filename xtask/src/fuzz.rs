//! `cargo xtask fuzz`: bytes chosen by coverage, for as long as it is told to.
//! The one rule: the targets are those of the test suite, and what breaks one is kept as a file.

use anyhow::Result;

use crate::command::{cargo, find, run, say, workspace};

/// Runs a target of `tests/fuzz` under libFuzzer, beginning with its corpus.
pub(crate) fn fuzz(target: &str, seconds: u32) -> Result<()> {
    if find("cargo-fuzz").is_none() {
        say("Installing", "cargo-fuzz");
        run(cargo().args(["install", "cargo-fuzz", "--locked"]))?;
    }
    let tests = workspace().join("tests").join("fuzz");
    // Without a sanitizer: nothing here is unsafe, and a stable compiler will do.
    run(cargo()
        .args(["fuzz", "run", "--sanitizer", "none", "--features", "libfuzzer", "--fuzz-dir"])
        .arg(&tests)
        .arg("--target-dir")
        .arg(workspace().join("target").join("fuzz"))
        .args([target, "--", "-max_len=8192", "-timeout=20"])
        .arg(format!("-max_total_time={seconds}")))
}
