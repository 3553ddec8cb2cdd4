//! The end-to-end tests, built and listed.

use std::process::Command;

use anyhow::{Context as _, Result};
use build_tools::{
    command::cargo_into_target,
    target::Target,
    test_suite::{Test, TestBinary, build_test_binaries},
};

/// How the names of tests begin that need no kernel, or any, or old versions of `nft`, which a virtual machine does not have.
/// `cargo xtask test` runs them.
const NOT_OF_KERNELS: [&str; 2] = ["brain_chain::", "packet_path::listing::every_nft_"];

/// The packages and their tests: end to end, and of a backend in the kernel.
const TESTS: [[&str; 4]; 2] =
    [["--package", "tests", "--test", "end_to_end"], ["--package", "kube-proxy-ipvs", "--test", "kernel"]];

/// Builds the end-to-end tests, without those of a browser, and lists them; for another machine with the binaries that run there.
pub(crate) fn end_to_end_tests(other: Option<&Target>) -> Result<Vec<Test>> {
    let mut tests = Vec::new();
    for binary in binaries(cargo_into_target("test"))? {
        tests.extend(binary.tests()?);
    }
    if let Some(target) = other {
        let others = binaries(target.cargo("test", &[]))?;
        for test in &mut tests {
            let other = others.iter().find(|it| test.suite.starts_with(it.package()));
            let other = other.with_context(|| format!("cargo has not built {} for it", test.suite))?;
            other.path().clone_into(&mut test.binary);
        }
    }
    tests.retain(|it| !NOT_OF_KERNELS.iter().any(|begin| it.name.starts_with(begin)));
    // The basic tests come first: most regressions fail there, early.
    tests.sort_by_key(|it| (!it.name.starts_with("sockets::"), it.name.clone()));
    Ok(tests)
}

fn binaries(mut cargo_test: Command) -> Result<Vec<TestBinary>> {
    cargo_test.args(TESTS.as_flattened());
    build_test_binaries(cargo_test)
}
