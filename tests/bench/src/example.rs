//! Benchmarks that are examples of the crate they measure: each prints its figures as JSON.

use std::process::Command;

use anyhow::{Context as _, Result};
use build_tools::command::{cargo_into_target, output, run, workspace};
use serde::de::DeserializeOwned;

/// Builds an example of a package, with optimizations.
pub(crate) fn build(package: &str, example: &str) -> Result<()> {
    run(cargo_into_target("build").args(["--release", "--package", package, "--example", example]))
}

/// Runs an example in a process of its own.
pub(crate) fn measure<T: DeserializeOwned>(example: &str, arguments: &[u32]) -> Result<T> {
    let mut command = Command::new(workspace().join("target/release/examples").join(example));
    let figures = output(command.args(arguments.iter().map(u32::to_string)))?;
    serde_json::from_str(&figures).with_context(|| format!("{example} did not print figures"))
}
