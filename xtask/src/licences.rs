//! `cargo xtask licences`: licences, sources, versions and known vulnerabilities of the dependencies.
//! Invariant: `deny.toml` decides. What could not be checked is returned with the reason, never passed over.

use std::{fs, process::Command};

use anyhow::Result;
use build_tools::{
    command::{cargo_home, output, run, status, workspace},
    programs::cargo_tool,
};

/// The version that is installed where the tool is missing.
const CARGO_DENY: &str = "0.20.2";
/// In seconds.
const FETCH_TIMEOUT: &str = "120";

/// Checks the dependencies; returns why known vulnerabilities could not be checked, if so.
pub(crate) fn licences() -> Result<Option<String>> {
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
