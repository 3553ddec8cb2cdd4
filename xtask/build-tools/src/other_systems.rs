//! The userspace backend for other operating systems: built for Windows, where Wine runs it, and checked for macOS.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use crate::{
    command::{cargo_into_target, output, run, status, workspace},
    programs::{find, find_or_install},
    target::require_standard_library,
};

const PACKAGE: &str = "kube-proxy-userspace";
const WINDOWS: &str = "x86_64-pc-windows-gnu";
const MACOS: &str = "aarch64-apple-darwin";
/// Where Debian has it.
const WINE: &str = "/usr/lib/wine/wine64";

/// The backend for Windows, beside a library that Wine before 9.0 lacks.
pub fn windows_binary() -> PathBuf {
    workspace().join("target/windows/kube-proxy-userspace.exe")
}

/// The program that runs it here.
pub fn wine() -> Option<PathBuf> {
    find("wine64").or_else(|| Some(PathBuf::from(WINE)).filter(|it| it.exists()))
}

/// Builds the backend for other systems, as far as tools exist or can be installed, else warns; fails if it does not compile.
pub fn build_for_other_systems() -> Result<()> {
    let warn = |error: anyhow::Error| status("Warning", &format!("{error:#}"));
    // Of an earlier run.
    let _ = fs::remove_file(windows_binary());
    match windows_tools() {
        Ok(gcc) => build_for_windows(&gcc)?,
        Err(error) => warn(error),
    }
    match require_standard_library(MACOS) {
        Ok(()) => check_for_macos()?,
        Err(error) => warn(error),
    }
    Ok(())
}

/// What builds and runs a program of Windows; returns the C compiler.
fn windows_tools() -> Result<PathBuf> {
    let gcc = find_or_install("x86_64-w64-mingw32-gcc", "gcc-mingw-w64-x86-64")?;
    if wine().is_none() {
        // Debian's program is not on the PATH: it is looked for below, wherever it is.
        let _ = find_or_install("wine64", "wine64");
        wine().context("`wine64` is missing: install it (package `wine64` on Debian and Ubuntu)")?;
    }
    require_standard_library(WINDOWS)?;
    Ok(gcc)
}

fn build_for_windows(gcc: &Path) -> Result<()> {
    run(cargo_into_target("build").args(["--package", PACKAGE, "--target", WINDOWS]))?;
    let binary = windows_binary();
    let folder = binary.parent().context("it is in a folder")?;
    fs::create_dir_all(folder)?;
    let built = workspace().join("target").join(WINDOWS).join("debug/kube-proxy-userspace.exe");
    fs::copy(built, &binary)?;
    let library = workspace().join("backends/userspace/tests/bcryptprimitives.c");
    let mut compile = Command::new(gcc);
    compile.args(["-shared", "-o"]).arg(folder.join("bcryptprimitives.dll")).arg(library).arg("-ladvapi32");
    output(&mut compile).map(drop)
}

/// Without TLS, whose C code needs Apple's compiler.
fn check_for_macos() -> Result<()> {
    let check = ["--package", PACKAGE, "--no-default-features", "--target", MACOS];
    run(cargo_into_target("check").args(check))
}
