//! The end-to-end tests, built and listed.

use std::process::Command;

use anyhow::{Context as _, Result};
use build_tools::{
    command::{cargo, workspace},
    target::Target,
    test_suite::{Test, TestBinary, build_test_binaries},
};

/// How the names of tests begin that need no kernel, or any, or old versions of `nft`, which a virtual machine does not have.
/// `cargo xtask test` runs them.
const NOT_OF_KERNELS: [&str; 2] = ["brain_chain::", "packet_path::listing::every_nft_"];

/// Builds the end-to-end tests, without those of a browser, and lists them; for another machine with the binary that runs there.
pub(crate) fn end_to_end_tests(other: Option<&Target>) -> Result<Vec<Test>> {
    let mut build = cargo();
    build.args(["test", "--target-dir"]).arg(workspace().join("target"));
    let mut tests = binary(build)?.tests()?;
    if let Some(target) = other {
        let other = binary(target.cargo("test", &[]))?;
        tests.iter_mut().for_each(|it| other.path().clone_into(&mut it.binary));
    }
    tests.retain(|it| !NOT_OF_KERNELS.iter().any(|begin| it.name.starts_with(begin)));
    // The basic tests come first: most regressions fail there, early.
    tests.sort_by_key(|it| (!it.name.starts_with("sockets::"), it.name.clone()));
    Ok(tests)
}

fn binary(mut cargo_test: Command) -> Result<TestBinary> {
    cargo_test.args(["--package", "tests", "--test", "end_to_end"]);
    build_test_binaries(cargo_test)?.pop().context("cargo has built no end-to-end tests")
}
