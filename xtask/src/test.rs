//! `cargo xtask test`: every test of the workspace.
//! Invariant: skipped tests are listed at the end with their reasons.

use std::fs;

use anyhow::{Context as _, Result};
use build_tools::{
    SKIPPED_TESTS_FILE,
    build::build_for_tests,
    command::{cargo, run, status, workspace},
    machine::Machine,
    programs::{install_font, promtool, test_programs},
    target::Target,
};

use crate::{contract::contract, licences::licences};

/// Builds everything and runs the tests whose names contain `filter`.
pub(crate) fn test(filter: Option<&str>) -> Result<()> {
    let unchecked = if filter.is_none() { licences().context("the dependencies")? } else { None };
    let unlinted = if filter.is_none() { contract().context("the package of the contract")? } else { None };
    let unbuilt = if filter.is_none() { other_machines()? } else { None };
    // A missing program has been warned about; its tests are skipped.
    let _ = test_programs();
    if let Err(error) = promtool() {
        status("Warning", &format!("{error:#}"));
    }
    build_for_tests()?;

    let workspace_without_kernel_side = ["--workspace", "--exclude", "proxy-ebpf"];
    let target = workspace().join("target");
    // Tests run the examples, and `cargo test` with a filter does not build them.
    let mut examples = cargo();
    examples.arg("build").args(workspace_without_kernel_side).args(["--examples", "--target-dir"]);
    run(examples.arg(&target))?;

    let skipped = target.join("skipped-tests");
    // It is missing after a run that skipped nothing.
    let _ = fs::remove_file(&skipped);
    let result = run(cargo()
        .arg("test")
        .args(workspace_without_kernel_side)
        .args(["--no-fail-fast", "--target-dir"])
        .arg(&target)
        .args(filter)
        // One at a time: a process is in one cgroup, with all its threads.
        .args(["--", "--test-threads=1"])
        .env(SKIPPED_TESTS_FILE, &skipped));

    let skipped = fs::read_to_string(&skipped).unwrap_or_default();
    if !skipped.is_empty() {
        println!("\n{skipped}{} tests were skipped, for the reasons above.", skipped.lines().count());
    }
    if let Some(reason) = unchecked {
        println!("\nAdvisories of the dependencies were not checked: {reason}");
    }
    if let Some(reason) = unlinted {
        println!("\nThe .proto files were not checked with buf: {reason}");
    }
    if let Some(reason) = unbuilt {
        println!("\nThe product was not compiled for other machines: {reason}");
    }
    result
}

/// Compiles the product for the machines that this one is not, without linking it: `vmtest --arch` runs it. Returns why
/// it could not be compiled, if something is missing.
fn other_machines() -> Result<Option<String>> {
    let own = Machine::own()?;
    for machine in Machine::ALL.into_iter().filter(|it| *it != own) {
        let target = match Target::find_or_install(machine) {
            Ok(target) => target,
            Err(reason) => return Ok(Some(format!("{reason:#}"))),
        };
        status("Checking", &format!("the product for {}", machine.name()));
        run(target.cargo("check", &[]).args(["--locked", "--package", "kube-proxy-ebpf"]))
            .with_context(|| format!("the product for {}", machine.name()))?;
    }
    Ok(None)
}

/// Takes the pictures in the documents.
pub(crate) fn pictures() -> Result<()> {
    let _ = test_programs();
    install_font()?;
    build_for_tests()?;
    run(cargo()
        .args(["test", "--workspace", "--exclude", "proxy-ebpf", "--test", "ui", "--target-dir"])
        .arg(workspace().join("target"))
        .args(["the_pictures_of_the_page", "--", "--ignored", "--nocapture"]))?;
    status("Ready", "docs/pictures");
    Ok(())
}

/// Writes the help texts of metrics into the documents.
pub(crate) fn metrics() -> Result<()> {
    run(cargo()
        .args(["test", "--package", "admin", "--target-dir"])
        .arg(workspace().join("target"))
        .args(["the_documented_help_texts_are_those_that_are_served"])
        .env("KUBE_PROXY_EBPF_UPDATE_DOCUMENTS", "1"))?;
    status("Ready", "docs/metrics.md");
    Ok(())
}
