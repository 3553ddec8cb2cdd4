//! Benchmarks that are examples of the crate they measure: each prints its figures as JSON.

use std::process::Command;

use anyhow::{Context as _, Result};
use build_tools::command::{cargo, output, run, workspace};
use serde::de::DeserializeOwned;

/// Builds examples, given as packages and names, with optimisations.
pub(crate) fn build(examples: &[(&str, &str)]) -> Result<()> {
    let mut build = cargo();
    build.args(["build", "--release", "--target-dir"]).arg(workspace().join("target"));
    for (package, example) in examples {
        build.args(["--package", package, "--example", example]);
    }
    run(&mut build)
}

/// Runs an example in a process of its own.
pub(crate) fn measure<T: DeserializeOwned>(example: &str, arguments: &[u32]) -> Result<T> {
    let mut command = Command::new(workspace().join("target/release/examples").join(example));
    let figures = output(command.args(arguments.iter().map(u32::to_string)))?;
    serde_json::from_str(&figures).with_context(|| format!("{example} did not print figures"))
}
