//! `cargo xtask build-ebpf` and `cargo xtask build`.
//! The one rule: a result is replaced only if its bytes differ, so that nothing is rebuilt for nothing.

use std::{env, path::PathBuf};

use anyhow::{Result, bail};

use crate::{
    command::{cargo, copy_if_changed, foreign_cargo, run, say, workspace},
    setup::{Toolchain, setup},
};

/// A build of the kernel object, and of the binary that carries it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    /// What a node runs.
    Product,
    /// Can be stopped at named steps.
    FaultPoints,
    /// The same, with another layout of the maps.
    NextLayout,
}

impl Variant {
    const ALL: [Self; 3] = [Self::Product, Self::FaultPoints, Self::NextLayout];

    fn features(self) -> Option<&'static str> {
        match self {
            Self::Product => None,
            Self::FaultPoints => Some("fault-points"),
            Self::NextLayout => Some("fault-points,next-layout"),
        }
    }

    /// Where the backend's build script looks for the object.
    fn object(self) -> &'static str {
        match self {
            Self::Product => "kube-proxy-ebpf.o",
            Self::FaultPoints => "kube-proxy-ebpf-fault-points.o",
            Self::NextLayout => "kube-proxy-ebpf-fault-points-next-layout.o",
        }
    }

    /// Where the tests look for the binary, below target/test-binaries.
    fn folder(self) -> &'static str {
        match self {
            Self::Product => "product",
            Self::FaultPoints => "fault-points",
            Self::NextLayout => "next-layout",
        }
    }
}

/// Builds the kernel object in the given variants.
pub(crate) fn build_ebpf(variants: &[Variant]) -> Result<()> {
    let toolchain = setup()?;
    for &variant in variants {
        build_object(&toolchain, variant)?;
    }
    Ok(())
}

fn build_object(toolchain: &Toolchain, variant: Variant) -> Result<()> {
    let arch = match env::consts::ARCH {
        arch @ ("x86_64" | "aarch64") => arch,
        other => bail!("{other} is no target of kube-proxy-ebpf: it runs on x86_64 and aarch64"),
    };
    let with = variant.features().map_or(String::new(), |it| format!(" ({it})"));
    say("Compiling", &format!("the kernel object{with}"));

    let target_dir = workspace().join("target/kernel");
    let flags = [&format!("--cfg=bpf_target_arch=\"{arch}\""), "-Cdebuginfo=2", "-Clink-arg=--btf"];
    let mut command = foreign_cargo(&toolchain.cargo);
    command
        .env("RUSTC", &toolchain.rustc)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("LD_LIBRARY_PATH", &toolchain.llvm)
        .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", &toolchain.linker)
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        .args(["build", "--locked", "--package", "proxy-ebpf", "--profile", "kernel"])
        .args(["--target", "bpfel-unknown-none", "-Z", "build-std=core", "--target-dir"])
        .arg(&target_dir);
    if let Some(features) = variant.features() {
        command.args(["--features", features]);
    }
    run(&mut command)?;

    let built = target_dir.join("bpfel-unknown-none/kernel/kube-proxy-ebpf-kernel");
    copy_if_changed(&built, &target_dir.join(variant.object()))?;
    Ok(())
}

/// Builds the product, kernel object included, and gives back its path.
pub(crate) fn build(release: bool) -> Result<PathBuf> {
    build_ebpf(&[Variant::Product])?;
    build_binary(Variant::Product, release)
}

/// Builds the binary around a kernel object that is built already.
fn build_binary(variant: Variant, release: bool) -> Result<PathBuf> {
    let target = workspace().join("target");
    let mut command = cargo();
    command.args(["build", "--package", "kube-proxy-ebpf", "--target-dir"]).arg(&target);
    if release {
        command.arg("--release");
    }
    if let Some(features) = variant.features() {
        command.args(["--features", features]);
    }
    run(&mut command)?;
    Ok(target.join(if release { "release" } else { "debug" }).join("kube-proxy-ebpf"))
}

/// Builds every variant, kernel objects included, to a place where no other build replaces it.
pub(crate) fn build_for_tests() -> Result<()> {
    build_ebpf(&Variant::ALL)?;
    // The product last: it is what stays in target/debug.
    for variant in Variant::ALL.into_iter().rev() {
        let built = build_binary(variant, false)?;
        let kept = workspace().join("target/test-binaries").join(variant.folder()).join("kube-proxy-ebpf");
        copy_if_changed(&built, &kept)?;
    }
    Ok(())
}
