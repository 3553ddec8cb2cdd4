//! `cargo xtask licences`: may we use what we use?
//! The one rule: `deny.toml` decides, with cargo-deny where it is installed, without it by what is here.

use std::{collections::BTreeSet, env, fs};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use crate::command::{cargo, find, output, run, say, workspace};

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    /// None for our own.
    source: Option<String>,
}

/// Checks the licences and the sources of every dependency, and known vulnerabilities as far as that works offline.
pub(crate) fn licences() -> Result<()> {
    if find("cargo-deny").is_some() {
        run(cargo().args(["deny", "--offline", "check", "bans", "licenses", "sources"]))?;
        let home =
            env::var_os("CARGO_HOME").map(Into::into).or_else(|| env::home_dir().map(|it| it.join(".cargo")));
        if home.is_some_and(|it: std::path::PathBuf| it.join("advisory-dbs").exists()) {
            return run(cargo().args(["deny", "--offline", "check", "advisories"]));
        }
        say("Skipped", "advisories: there is no copy of their database here (`cargo deny fetch` gets it)");
        return Ok(());
    }
    say(
        "Skipped",
        "advisories and bans: cargo-deny is not installed; licences and sources are checked without it",
    );
    let allowed =
        allowed(&fs::read_to_string(workspace().join("deny.toml")).context("cannot read deny.toml")?);
    // Only what this platform needs has been fetched already.
    let platform = format!("{}-unknown-linux-gnu", env::consts::ARCH);
    let text = output(cargo().args([
        "metadata",
        "--format-version",
        "1",
        "--locked",
        "--filter-platform",
        &platform,
    ]))?;
    let metadata: Metadata = serde_json::from_str(&text)?;
    let complaints: Vec<_> = metadata.packages.iter().filter_map(|it| complaint(it, &allowed)).collect();
    if !complaints.is_empty() {
        bail!("deny.toml does not allow:\n{}", complaints.join("\n"));
    }
    say("Allowed", &format!("the licences and sources of {} packages", metadata.packages.len()));
    Ok(())
}

fn complaint(package: &Package, allowed: &BTreeSet<String>) -> Option<String> {
    let Package { name, version, license, source } = package;
    if source.as_ref().is_some_and(|it| !it.starts_with("registry+")) {
        return Some(format!("  {name} {version}: it comes from {}", source.as_deref().unwrap_or_default()));
    }
    match license {
        // Ours alone; the kernel object is under two, of which the user of its source chooses.
        Some(license) if allows(license, allowed) => None,
        Some(license) => Some(format!("  {name} {version}: its licence is {license}")),
        None => Some(format!("  {name} {version}: it names no licence")),
    }
}

/// The list `allow` of the table `licenses`.
fn allowed(deny: &str) -> BTreeSet<String> {
    let table = deny.split("[licenses]").nth(1).unwrap_or_default();
    let list = table.split("allow = [").nth(1).and_then(|it| it.split(']').next()).unwrap_or_default();
    list.lines().filter_map(|it| it.split('"').nth(1)).map(str::to_owned).collect()
}

/// Does an SPDX expression leave us a choice that is allowed?
fn allows(expression: &str, allowed: &BTreeSet<String>) -> bool {
    // An old way to write OR, still in use.
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<_> = spaced.split_whitespace().collect();
    let mut rest = &*words;
    any(&mut rest, allowed) && rest.is_empty()
}

fn any(words: &mut &[&str], allowed: &BTreeSet<String>) -> bool {
    let mut verdict = all(words, allowed);
    while let Some((&"OR", rest)) = words.split_first() {
        *words = rest;
        verdict |= all(words, allowed);
    }
    verdict
}

fn all(words: &mut &[&str], allowed: &BTreeSet<String>) -> bool {
    let mut verdict = one(words, allowed);
    while let Some((&"AND", rest)) = words.split_first() {
        *words = rest;
        verdict &= one(words, allowed);
    }
    verdict
}

fn one(words: &mut &[&str], allowed: &BTreeSet<String>) -> bool {
    let Some((&first, rest)) = words.split_first() else { return false };
    *words = rest;
    if first == "(" {
        let verdict = any(words, allowed);
        let Some((&")", rest)) = words.split_first() else { return false };
        *words = rest;
        return verdict;
    }
    let mut name = first.to_owned();
    if let [with @ "WITH", exception, rest @ ..] = *words {
        name = format!("{name} {with} {exception}");
        *words = rest;
    }
    allowed.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(expression: &str, expect: bool) {
        let deny =
            "[licenses]\nallow = [\n  \"MIT\",\n  \"Apache-2.0 WITH LLVM-exception\",\n  \"Zlib\",\n]\n";
        assert_eq!(allows(expression, &allowed(deny)), expect, "{expression}");
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
