//! `cargo xtask test`: every test there is.
//! The one rule: what was skipped is said at the end; nothing is silently green.

use std::fs;

use anyhow::{Result, bail};
use serde::Deserialize;

use crate::{
    build::build_for_tests,
    command::{cargo, output, run, say, workspace},
    setup,
};

/// What `cargo metadata` says about the workspace, as far as it matters here.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

/// Builds everything and runs the tests whose names contain `filter`.
pub(crate) fn test(filter: Option<&str>) -> Result<()> {
    // End-to-end tests say themselves that they are skipped if this could not be had.
    if let Err(error) = setup::tool("ip", "iproute2") {
        say("Warning", &format!("{error:#}"));
    }
    build_for_tests()?;
    let mut examples = cargo();
    // A test runs them, but cargo builds them only where it is told nothing of what to test.
    examples.args(["build", "--workspace", "--exclude", "proxy-ebpf", "--examples", "--target-dir"]);
    run(examples.arg(workspace().join("target")))?;
    let skipped = workspace().join("target/skipped-tests");
    // There is none after a run without skipped tests.
    let _ = fs::remove_file(&skipped);

    let cargo_test = |selection: &[String], arguments: &[&str]| {
        let mut command = cargo();
        // The same packages every time: another selection would have other features, and be another build.
        command.args(["test", "--workspace", "--exclude", "proxy-ebpf", "--no-fail-fast", "--target-dir"]);
        command.arg(workspace().join("target")).args(selection).args(filter).arg("--").args(arguments);
        command.env(tests::sandbox::SKIPPED, &skipped);
        run(&mut command)
    };
    let (end_to_end, others) = integration_tests()?;
    let mut all = vec!["--lib".to_owned(), "--bins".to_owned()];
    all.extend(others);
    let results = [
        cargo_test(&["--doc".to_owned()], &[]),
        cargo_test(&all, &[]),
        // A process is in one cgroup at a time.
        cargo_test(&end_to_end, &["--test-threads=1"]),
    ];

    let skipped = fs::read_to_string(&skipped).unwrap_or_default();
    if !skipped.is_empty() {
        println!("\n{skipped}{} tests were skipped.", skipped.lines().count());
    }
    let failures: Vec<_> =
        results.into_iter().filter_map(|it| it.err().map(|it| format!("{it:#}"))).collect();
    if !failures.is_empty() {
        bail!("{}", failures.join("\n"));
    }
    Ok(())
}

/// The arguments that select the integration tests: those of the package `tests`, and all others.
fn integration_tests() -> Result<(Vec<String>, Vec<String>)> {
    let text = output(cargo().args(["metadata", "--no-deps", "--format-version", "1"]))?;
    let metadata: Metadata = serde_json::from_str(&text)?;
    let (mut end_to_end, mut others) = (Vec::new(), Vec::new());
    for package in metadata.packages {
        let list = if package.name == "tests" { &mut end_to_end } else { &mut others };
        for target in package.targets.into_iter().filter(|it| it.kind.iter().any(|kind| kind == "test")) {
            list.extend(["--test".to_owned(), target.name]);
        }
    }
    Ok((end_to_end, others))
}
