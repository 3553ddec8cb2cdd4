//! Benchmarks that are examples of the crate they measure: each prints its figures as JSON.

use std::process::Command;

use anyhow::{Context as _, Result};
use build_tools::command::{cargo_into_target, output, run, workspace};
use serde::de::DeserializeOwned;

/// Builds examples, given as packages and names, with optimizations.
pub(crate) fn build(examples: &[(&str, &str)]) -> Result<()> {
    let examples = examples.iter().flat_map(|(package, it)| ["--package", package, "--example", it]);
    run(cargo_into_target("build").arg("--release").args(examples))
}

/// Runs an example in a process of its own.
pub(crate) fn measure<T: DeserializeOwned>(example: &str, arguments: &[u32]) -> Result<T> {
    let mut command = Command::new(workspace().join("target/release/examples").join(example));
    let figures = output(command.args(arguments.iter().map(u32::to_string)))?;
    serde_json::from_str(&figures).with_context(|| format!("{example} did not print figures"))
}
