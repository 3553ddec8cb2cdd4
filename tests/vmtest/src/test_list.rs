//! The end-to-end tests, built and listed.

use std::{collections::BTreeMap, path::PathBuf, process::Command};

use anyhow::{Context as _, Result};
use build_tools::{
    command::{cargo, output, workspace},
    target::Target,
};

use crate::plan::Test;

/// How the titles of tests begin that need no kernel, or any, or programs that a virtual machine does not have: a browser, and
/// old versions of `nft`. `cargo xtask test` runs them.
const NOT_OF_KERNELS: [&str; 10] = [
    "architecture::",
    "brain_chain::",
    "deploy::",
    "observability::",
    "packet_path::listing::every_nft_",
    "ui::a_browser_",
    "ui::a_process_that_goes_",
    "ui::it_fits_on_any_screen_",
    "ui::ten_thousand_services_",
    "vocabulary::",
];

/// Builds the test binaries and lists their tests: for another machine those of the same names.
pub(crate) fn end_to_end_tests(other: Option<&Target>) -> Result<Vec<Test>> {
    let mut build = cargo();
    build.args(["test", "--target-dir"]).arg(workspace().join("target"));
    let own = test_binaries(build)?;
    let others = other.map(|it| test_binaries(it.cargo("test", &[]))).transpose()?;
    let mut tests = Vec::new();
    for (suite, binary) in own {
        let run = match &others {
            None => &binary,
            Some(others) => others.get(&suite).with_context(|| format!("{suite} was not built"))?,
        };
        let list =
            |more: &[&str]| output(Command::new(&binary).args(["--list", "--format", "terse"]).args(more));
        let (all, ignored) = (list(&[])?, list(&["--ignored"])?);
        // What is ignored is a process of other tests.
        for line in all.lines().filter(|line| ignored.lines().all(|it| it != *line)) {
            if let Some(name) = line.strip_suffix(": test") {
                let (binary, suite, name) = (run.clone(), suite.clone(), name.to_owned());
                tests.push(Test { binary, suite, name });
            }
        }
    }
    tests.retain(|it| !NOT_OF_KERNELS.iter().any(|begin| it.title().starts_with(begin)));
    // The basic suite comes first: most regressions fail there, early.
    tests.sort_by_key(|it| (it.suite != "sockets", it.suite.clone()));
    Ok(tests)
}

/// Builds the test binaries, with a `cargo test`: their paths, by name.
fn test_binaries(mut build: Command) -> Result<BTreeMap<String, PathBuf>> {
    build.args(["--package", "tests", "--tests", "--no-run", "--message-format", "json"]);
    Ok(output(&mut build)?.lines().filter_map(test_binary).collect())
}

/// Name and path of an integration test, from a line of `cargo --message-format json`.
fn test_binary(line: &str) -> Option<(String, PathBuf)> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    let target = &message["target"];
    let is_test = target["kind"].as_array()?.iter().any(|it| it == "test");
    let (name, binary) = (target["name"].as_str()?, message["executable"].as_str()?);
    is_test.then(|| (name.to_owned(), binary.into()))
}
