//! `cargo xtask mutants`: mutation testing of the pure crates.
//! Invariant: each crate is tested by its own tests alone.

use anyhow::{Result, ensure};
use build_tools::{
    command::{cargo, run, status, workspace},
    programs::find,
};

/// The crates, each with the features of its tests.
const CRATES: [(&str, &[&str]); 4] =
    [("proxy-common", &["--features", "user"]), ("model", &[]), ("wire", &[]), ("brain", &[])];

/// Tests the mutants of a crate, or of all, or of a part of them.
pub(crate) fn mutants(package: Option<&str>, shard: Option<&str>) -> Result<()> {
    if find("cargo-mutants").is_none() {
        status("Installing", "cargo-mutants");
        run(cargo().args(["install", "cargo-mutants", "--locked"]))?;
    }
    let chosen: Vec<_> = CRATES.iter().filter(|(name, _)| package.is_none_or(|it| it == *name)).collect();
    ensure!(!chosen.is_empty(), "no such crate; choose one of {}", CRATES.map(|(name, _)| name).join(", "));
    let mut failed = Vec::new();
    for (name, features) in chosen {
        let output = workspace().join("target/mutants").join(name);
        let mut command = cargo();
        command
            .args(["mutants", "--package", name, "--no-shuffle", "--timeout", "60", "--output"])
            .arg(&output);
        command.args(*features).args(shard.map(|it| format!("--shard={it}")));
        // A rebuild per mutant: debug information is not needed, and most of the crate is unchanged.
        command.env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_INCREMENTAL", "1").current_dir(workspace());
        if run(&mut command).is_err() {
            failed.push(name.to_owned());
        }
    }
    ensure!(failed.is_empty(), "not every mutant is noticed in {}: see target/mutants", failed.join(", "));
    Ok(())
}
