//! `cargo xtask lint`: what is checked without running the product; `cargo xtask licenses`: the dependencies alone.
//! Invariant: what could not be checked is listed at the end with the reason. `deny.toml` decides about dependencies.

use std::{fs, process::Command};

use anyhow::{Context as _, Result};
use build_tools::{
    command::{cargo, cargo_home, cargo_into_target, output, run, status, workspace},
    machine::Machine,
    programs::cargo_tool,
    target::Target,
};

use crate::contract::contract;

/// The version that is installed where the tool is missing.
const CARGO_DENY: &str = "0.20.2";
/// In seconds.
const FETCH_TIMEOUT: &str = "120";

/// Checks the format, clippy's lints, the product for other machines, the dependencies, and the package of the contract.
pub(crate) fn lint() -> Result<()> {
    run(cargo().args(["fmt", "--all", "--check"]))?;
    run(cargo_into_target("clippy").args(["--locked", "--all-targets", "--", "-D", "warnings"]))?;
    let unchecked = [
        ("the product for other machines", other_machines()?),
        ("advisories of the dependencies", licenses().context("the dependencies")?),
        ("the .proto files with buf", contract().context("the package of the contract")?),
    ];
    for (what, reason) in unchecked {
        if let Some(reason) = reason {
            status("Unchecked", &format!("{what}: {reason}"));
        }
    }
    Ok(())
}

/// Compiles the product for other machines, without linking: `vmtest --arch` runs it. Returns why that is impossible, if so.
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

/// Checks licenses, sources, versions and known vulnerabilities of dependencies; returns why known
/// vulnerabilities could not be checked, if so.
pub(crate) fn licenses() -> Result<Option<String>> {
    let program = cargo_tool("cargo-deny", CARGO_DENY)?;
    let deny = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        command.args(arguments).current_dir(workspace());
        command
    };
    // A build downloads only what its platform needs, but the graph is that of all platforms.
    run(Command::new("cargo").args(["fetch", "--locked"]).current_dir(workspace()))?;
    run(&mut deny(&["--offline", "check", "bans", "licenses", "sources"]))?;
    // The database of https://rustsec.org.
    let mut fetch = Command::new("timeout");
    fetch.arg(FETCH_TIMEOUT).arg(&program).args(["fetch", "db"]).current_dir(workspace());
    if let Err(error) = output(&mut fetch) {
        let error = format!("{error:#}");
        let reason = error.lines().last().unwrap_or_default();
        if !has_database() {
            return Ok(Some(format!("there is no advisory database, and it cannot be fetched: {reason}")));
        }
        status("Warning", &format!("the advisory database is that of an earlier run: {reason}"));
    }
    run(&mut deny(&["--offline", "check", "advisories"]))?;
    Ok(None)
}

/// Whether cargo-deny has fetched the database before. A failed fetch leaves an empty folder.
fn has_database() -> bool {
    let databases = cargo_home().ok().and_then(|it| fs::read_dir(it.join("advisory-dbs")).ok());
    databases.into_iter().flatten().flatten().any(|it| it.path().join("crates").exists())
}
