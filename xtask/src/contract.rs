//! `cargo xtask contract`: the package of the contract, for programs outside of this workspace.
//! Invariant: what could not be checked is returned with the reason, never passed over.

use std::{path::PathBuf, process::Command};

use anyhow::{Context as _, Result};
use build_tools::{
    command::{cargo, cargo_into_target, output, run, status, workspace},
    programs::find_or_fetch,
    read,
};
use serde_json::Value;

/// The version of buf that is installed where it is missing.
const BUF: &str = "1.75.0";
/// The descriptor set of the last release, below `proto`.
const RELEASED: &str = "tests/released.binpb";

/// Checks the .proto files with buf, the package and its documentation; returns why buf could not be used, if so.
pub(crate) fn contract() -> Result<Option<String>> {
    let folder = workspace().join("proto");
    let skipped = match buf() {
        Ok(buf) => {
            run(Command::new(&buf).arg("lint").current_dir(&folder))?;
            run(Command::new(&buf).args(["breaking", "--against", RELEASED]).current_dir(&folder))?;
            None
        }
        // tests/compatibility.rs compares with the last release, too.
        Err(error) => Some(format!("{error:#}")),
    };
    let package = ["--package", "proxy-contract", "--locked"];
    run(cargo().arg("package").args(package).arg("--allow-dirty"))?;
    let doc = ["--no-deps", "--all-features"];
    run(cargo().arg("doc").args(package).args(doc).env("RUSTDOCFLAGS", "-D warnings"))?;
    Ok(skipped)
}

/// Finds buf, or installs it from npm in target/tools.
fn buf() -> Result<PathBuf> {
    find_or_fetch("buf", "buf/node_modules/.bin/buf", || {
        status("Installing", &format!("buf {BUF}, once"));
        let mut npm = Command::new("npm");
        npm.args(["install", "--no-audit", "--no-fund", "--prefix"])
            .arg(workspace().join("target/tools/buf"));
        output(npm.arg(format!("@bufbuild/buf@{BUF}")))
            .context("`buf` is missing: install it, or `npm`, which installs it")
            .map(drop)
    })
}

/// The encoded `google.protobuf.FileDescriptorSet` of the contract.
pub(crate) fn descriptors() -> Result<Vec<u8>> {
    let package = ["--package", "proxy-contract", "--no-default-features"];
    descriptors_of(cargo_into_target("check").args(package))
}

/// The encoded `FileDescriptorSet` of the contract, as a command of cargo that builds it writes it.
fn descriptors_of(build: &mut Command) -> Result<Vec<u8>> {
    let messages = output(build.args(["--message-format", "json"]))?;
    let messages = messages.lines().filter_map(|it| serde_json::from_str::<Value>(it).ok());
    let is_ours = |it: &Value| {
        it["reason"] == "build-script-executed"
            && it["package_id"].as_str().is_some_and(|it| it.contains("proxy-contract"))
    };
    let folder = messages.filter(is_ours).find_map(|it| Some(PathBuf::from(it["out_dir"].as_str()?)));
    let path =
        folder.context("cargo does not say where the build script has written")?.join("descriptors.bin");
    read(&path)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_descriptors_are_those_of_the_contract() {
        // Of a build that `cargo xtask test` has made already.
        let mut build = super::cargo_into_target("build");
        build.args(["--workspace", "--exclude", "proxy-ebpf", "--example", "lines"]);
        let descriptors = super::descriptors_of(&mut build).expect("the contract can be built");
        for it in ["localv1/localv1.proto", "globalv1/globalv1.proto", "localnetv1/localnetv1.proto"] {
            assert!(descriptors.windows(it.len()).any(|bytes| bytes == it.as_bytes()), "{it}");
        }
    }
}
