//! `cargo xtask licences`: the licences and sources of the dependencies.
//! Invariant: `deny.toml` decides; cargo-deny reads it where it is installed, otherwise this file does.

use std::{collections::BTreeSet, env, fs, path::PathBuf};

use anyhow::{Context as _, Result, bail};
use build_tools::{
    command::{cargo, output, run, status, workspace},
    programs::find,
};
use serde::Deserialize;
use spdx::{Expression, ParseMode};

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    /// `None` for the workspace's own crates.
    source: Option<String>,
}

/// Checks the licence and the source of every dependency, and known vulnerabilities as far as possible offline.
pub(crate) fn licences() -> Result<()> {
    if find("cargo-deny").is_some() {
        run(cargo().args(["deny", "--offline", "check", "bans", "licenses", "sources"]))?;
        let home = env::var_os("CARGO_HOME").map(PathBuf::from);
        let home = home.or_else(|| env::home_dir().map(|it| it.join(".cargo")));
        if home.is_some_and(|it| it.join("advisory-dbs").exists()) {
            return run(cargo().args(["deny", "--offline", "check", "advisories"]));
        }
        status("Skipped", "advisories: their database is not on this machine (`cargo deny fetch` gets it)");
        return Ok(());
    }
    status(
        "Skipped",
        "advisories and bans: cargo-deny is not installed; licences and sources are checked without it",
    );
    let allowed =
        allowed(&fs::read_to_string(workspace().join("deny.toml")).context("cannot read deny.toml")?);
    // Cargo has fetched only the dependencies for this platform.
    let platform = format!("{}-unknown-linux-gnu", env::consts::ARCH);
    let metadata = output(cargo().args([
        "metadata",
        "--format-version",
        "1",
        "--locked",
        "--filter-platform",
        &platform,
    ]))?;
    let metadata: Metadata = serde_json::from_str(&metadata)?;
    let violations: Vec<_> = metadata.packages.iter().filter_map(|it| violation(it, &allowed)).collect();
    if !violations.is_empty() {
        bail!("deny.toml does not allow:\n{}", violations.join("\n"));
    }
    status("Allowed", &format!("the licences and sources of {} packages", metadata.packages.len()));
    Ok(())
}

fn violation(package: &Package, allowed: &BTreeSet<String>) -> Option<String> {
    let Package { name, version, license, source } = package;
    if let Some(source) = source.as_ref().filter(|it| !it.starts_with("registry+")) {
        return Some(format!("  {name} {version}: its source is {source}"));
    }
    match license {
        Some(license) if is_allowed(license, allowed) => None,
        Some(license) => Some(format!("  {name} {version}: its licence is {license}")),
        None => Some(format!("  {name} {version}: it has no licence")),
    }
}

/// The list `allow` of the table `licenses`.
fn allowed(deny: &str) -> BTreeSet<String> {
    let table = deny.split("[licenses]").nth(1).unwrap_or_default();
    let list = table.split("allow = [").nth(1).and_then(|it| it.split(']').next()).unwrap_or_default();
    list.lines().filter_map(|it| it.split('"').nth(1)).map(str::to_owned).collect()
}

/// Whether an SPDX expression leaves an allowed choice.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    // Lax: some crates still write `/` for OR.
    Expression::parse_mode(expression, ParseMode::LAX)
        .is_ok_and(|it| it.evaluate(|licence| allowed.contains(&licence.to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(expression: &str, expect: bool) {
        let deny =
            "[licenses]\nallow = [\n  \"MIT\",\n  \"Apache-2.0 WITH LLVM-exception\",\n  \"Zlib\",\n]\n";
        assert_eq!(is_allowed(expression, &allowed(deny)), expect, "{expression}");
    }

    #[test]
    fn one_allowed_choice_is_enough() {
        check("GPL-2.0 OR MIT", true);
        check("GPL-2.0/MIT", true);
        check("(GPL-2.0 OR MIT) AND Zlib", true);
        check("Apache-2.0 WITH LLVM-exception", true);
    }

    #[test]
    fn every_part_of_a_conjunction_is_needed() {
        check("MIT AND GPL-2.0", false);
        check("MIT AND (GPL-2.0 OR Apache-2.0)", false);
        check("Apache-2.0", false);
        check("(MIT", false);
        check("", false);
    }
}
