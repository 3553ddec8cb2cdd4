//! The end-to-end tests, built and listed.

use std::{path::PathBuf, process::Command};

use anyhow::Result;
use build_tools::command::{cargo, output, workspace};

use crate::plan::Test;

/// Test binaries that need no kernel, or any.
const WITHOUT_KERNEL: [&str; 5] = ["architecture", "brain_chain", "deploy", "observability", "vocabulary"];

/// Builds the test binaries and lists their tests.
pub(crate) fn end_to_end_tests() -> Result<Vec<Test>> {
    let mut build = cargo();
    build.args(["test", "--package", "tests", "--tests", "--no-run", "--message-format", "json"]);
    let messages = output(build.arg("--target-dir").arg(workspace().join("target")))?;
    let mut tests = Vec::new();
    for (suite, binary) in messages.lines().filter_map(test_binary) {
        if WITHOUT_KERNEL.contains(&suite.as_str()) {
            continue;
        }
        let list =
            |more: &[&str]| output(Command::new(&binary).args(["--list", "--format", "terse"]).args(more));
        let (all, ignored) = (list(&[])?, list(&["--ignored"])?);
        // What is ignored is a process of other tests.
        for line in all.lines().filter(|line| ignored.lines().all(|it| it != *line)) {
            if let Some(name) = line.strip_suffix(": test") {
                let (binary, suite, name) = (binary.clone(), suite.clone(), name.to_owned());
                tests.push(Test { binary, suite, name });
            }
        }
    }
    // The basic suite comes first: most regressions fail there, early.
    tests.sort_by_key(|it| (it.suite != "sockets", it.suite.clone()));
    Ok(tests)
}

/// Name and path of an integration test, from a line of `cargo --message-format json`.
fn test_binary(line: &str) -> Option<(String, PathBuf)> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    let target = &message["target"];
    let is_test = target["kind"].as_array()?.iter().any(|it| it == "test");
    let (name, binary) = (target["name"].as_str()?, message["executable"].as_str()?);
    is_test.then(|| (name.to_owned(), binary.into()))
}
