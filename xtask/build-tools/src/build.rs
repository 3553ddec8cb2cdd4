//! Builds the kernel object and the binary that embeds it.
//! Invariant: a result is replaced only if its bytes differ, so that nothing is rebuilt without need.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use anyhow::{Context as _, Result};

use crate::{
    command::{cargo_home, cargo_into_target, cross_cargo, output, run, status, workspace},
    container::revision,
    create_folder,
    machine::Machine,
    read,
    target::Target,
    toolchain::Toolchain,
};

/// A build of the kernel object, and of the binary that embeds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Build {
    /// The build for users.
    Product,
    /// A build that can be stopped at named steps and delays each decision of its programs.
    Failpoints,
    /// A build like [`Self::Failpoints`], with a different layout of the maps.
    NextLayout,
    /// A developer's build, whose programs say lines of log.
    Log,
}

impl Build {
    /// The builds that tests run.
    const ALL: [Self; 3] = [Self::Product, Self::Failpoints, Self::NextLayout];

    fn features(self) -> Option<&'static str> {
        match self {
            Self::Product => None,
            Self::Failpoints => Some("fault-points"),
            Self::NextLayout => Some("fault-points,next-layout"),
            Self::Log => Some("log"),
        }
    }

    fn arguments(self) -> impl Iterator<Item = &'static str> {
        self.features().into_iter().flat_map(|it| ["--features", it])
    }

    /// The file name under which the binary's build script looks for the kernel object.
    fn object(self) -> String {
        let features = self.features().map_or(String::new(), |it| format!("-{}", it.replace(',', "-")));
        format!("kube-proxy-ebpf{features}.o")
    }

    /// The name of the folder of its maps, among the pins: `LAYOUT_VERSION` of proxy-common.
    pub fn layout(self) -> &'static str {
        if self == Self::NextLayout { "v1012" } else { "v12" }
    }

    fn test_binary(self) -> PathBuf {
        let folder = match self {
            Self::Product => "product",
            Self::Failpoints => "fault-points",
            Self::NextLayout => "next-layout",
            Self::Log => "log",
        };
        workspace().join(TEST_BINARIES).join(folder).join("kube-proxy-ebpf")
    }

    /// The binary that [`build_for_tests`] has built; panics if it has not.
    pub fn binary(self) -> PathBuf {
        let binary = self.test_binary();
        assert!(binary.exists(), "{} is missing: run the tests by `cargo xtask test`", binary.display());
        binary
    }
}

/// Where the tests find every [`Build`], from the root of the workspace.
const TEST_BINARIES: &str = "target/test-binaries";

/// The feature of the programs that `trace` puts in the place of the product's.
const TRACE: &str = "trace";

/// Builds the kernel objects of the product: that with its programs, and that with their traced variant.
pub fn build_ebpf() -> Result<()> {
    build_objects(&Toolchain::find_or_install()?, Build::Product)
}

/// Builds the kernel objects that a binary embeds. Only the product can trace.
fn build_objects(toolchain: &Toolchain, build: Build) -> Result<()> {
    build_object(toolchain, build.features(), &build.object())?;
    if build == Build::Product {
        build_object(toolchain, Some(TRACE), &format!("kube-proxy-ebpf-{TRACE}.o"))?;
    }
    Ok(())
}

fn build_object(toolchain: &Toolchain, features: Option<&str>, object: &str) -> Result<()> {
    let shown = features.map_or(String::new(), |it| format!(" ({it})"));
    status("Compiling", &format!("the kernel object{shown}"));

    let target_dir = workspace().join("target/kernel");
    // Of all bindings, only a traced function's registers depend on the machine, and no program reads them: all share the object.
    let mut flags =
        [r#"--cfg=bpf_target_arch="x86_64""#, "-Cdebuginfo=2", "-Clink-arg=--btf"].map(String::from).to_vec();
    flags.extend(remapped_paths(&toolchain.rustc)?);
    let mut command = cross_cargo(&toolchain.cargo);
    command
        .env("RUSTC", &toolchain.rustc)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("LD_LIBRARY_PATH", &toolchain.llvm)
        .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", &toolchain.linker)
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        .args(["build", "--locked", "--package", "proxy-ebpf", "--profile", "kernel"])
        .args(["--target", "bpfel-unknown-none", "-Z", "build-std=core", "--target-dir"])
        .arg(&target_dir);
    if let Some(features) = features {
        command.args(["--features", features]);
    }
    run(&mut command)?;

    let built = target_dir.join("bpfel-unknown-none/kernel/kube-proxy-ebpf-kernel");
    copy_if_changed(&built, &target_dir.join(object))
}

/// Flags that keep the folders of this machine out of what is built, so that other folders give the same bytes. The
/// workspace becomes `.`: a debugger that is started there still finds the sources.
fn remapped_paths(rustc: &Path) -> Result<[String; 3]> {
    let sysroot = output(Command::new(rustc).args(["--print", "sysroot"]).current_dir(workspace()))?;
    let remap = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
    Ok([remap(workspace(), "."), remap(&cargo_home()?, "/cargo"), remap(Path::new(&sysroot), "/rust")])
}

/// Builds the binary whose programs say lines of log, kernel object included, and returns its path.
pub fn build_with_log() -> Result<PathBuf> {
    build_objects(&Toolchain::find_or_install()?, Build::Log)?;
    build_binary(Build::Log)
}

/// Builds the product, kernel object included, and returns its path.
pub fn build(release: bool) -> Result<PathBuf> {
    if release {
        let binary = build_release(Machine::own()?)?;
        let path = workspace().join("target/release/kube-proxy-ebpf");
        copy_if_changed(&binary, &path)?;
        return Ok(path);
    }
    build_ebpf()?;
    build_binary(Build::Product)
}

/// Builds the product for a machine's nodes: optimized, and linked statically, so that it needs no file of a node.
pub fn build_release(machine: Machine) -> Result<PathBuf> {
    build_ebpf()?;
    Ok(build_static(machine, &["kube-proxy-ebpf"])?.join("kube-proxy-ebpf"))
}

/// Builds the backends on the contract as [`build_release`] builds the product, and returns their paths.
pub fn build_release_backends(machine: Machine) -> Result<Vec<PathBuf>> {
    let folder = build_static(machine, &BACKENDS)?;
    Ok(BACKENDS.iter().map(|it| folder.join(it)).collect())
}

/// Builds packages with optimizations, linked statically; returns the folder of their binaries.
fn build_static(machine: Machine, packages: &[&str]) -> Result<PathBuf> {
    let target = Target::find_or_install(machine)?;
    target.check_static()?;
    let mut flags = remapped_paths(&target.rustc())?.to_vec();
    flags.push("-Ctarget-feature=+crt-static".to_owned());
    let mut build = target.cargo("build", &flags);
    build.args(["--release", "--locked"]).args(packages.iter().flat_map(|it| ["--package", it]));
    run(build.env(COMMIT, commit()))?;
    Ok(target.folder("release"))
}

/// The variable with the commit that a release is built from. Other builds have none: each commit would rebuild them.
const COMMIT: &str = "KUBE_PROXY_EBPF_COMMIT";

/// The commit that the caller names, as where there is no git, or else the current one.
pub fn commit() -> String {
    // What a benchmark records makes the tree dirty: the next one would build everything again.
    static FIRST: OnceLock<String> = OnceLock::new();
    FIRST.get_or_init(|| env::var(COMMIT).ok().filter(|it| !it.is_empty()).unwrap_or_else(revision)).clone()
}

/// Builds the binary around a kernel object that has been built.
fn build_binary(build: Build) -> Result<PathBuf> {
    run(cargo_into_target("build").args(["--package", "kube-proxy-ebpf"]).args(build.arguments()))?;
    Ok(workspace().join("target/debug/kube-proxy-ebpf"))
}

/// The packages of the backends on the contract, each with a binary of its name.
const BACKENDS: [&str; 3] = ["kube-proxy-iptables", "kube-proxy-ipvs", "kube-proxy-userspace"];

pub fn backend_binary(package: &str) -> PathBuf {
    workspace().join("target/debug").join(package)
}

/// Builds the backends on the contract; returns the folder of their binaries.
pub fn build_backends(release: bool) -> Result<PathBuf> {
    let packages = BACKENDS.iter().flat_map(|it| ["--package", it]);
    run(cargo_into_target("build").args(packages).args(release.then_some("--release")))?;
    Ok(workspace().join("target").join(if release { "release" } else { "debug" }))
}

/// Builds the backends and every [`Build`], kernel objects included, and copies the binaries to where no other build replaces them.
pub fn build_for_tests() -> Result<()> {
    build_backends(false)?;
    let toolchain = Toolchain::find_or_install()?;
    Build::ALL.into_iter().try_for_each(|build| build_objects(&toolchain, build))?;
    // The product comes last: it stays in target/debug.
    for build in Build::ALL.into_iter().rev() {
        copy_if_changed(&build_binary(build)?, &build.test_binary())?;
    }
    Ok(())
}

/// Like [`build_for_tests`], for another machine: the path of each binary, and the path at which tests look for it there.
pub fn build_for_tests_on(target: &Target) -> Result<Vec<(PathBuf, PathBuf)>> {
    let toolchain = Toolchain::find_or_install()?;
    Build::ALL.into_iter().try_for_each(|build| build_objects(&toolchain, build))?;
    let build = |build: Build| {
        let package = ["--locked", "--package", "kube-proxy-ebpf"];
        run(target.cargo("build", &[]).args(package).args(build.arguments()))?;
        let copy = target.folder("debug").join(build.object()).with_extension("");
        copy_if_changed(&target.folder("debug").join("kube-proxy-ebpf"), &copy)?;
        Ok((copy, build.test_binary()))
    };
    Build::ALL.into_iter().rev().map(build).collect()
}

/// Copies a file unless the copy has the same bytes: its modification time decides what cargo rebuilds.
fn copy_if_changed(from: &Path, to: &Path) -> Result<()> {
    let new = read(from)?;
    if fs::read(to).is_ok_and(|old| old == new) {
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        create_folder(folder)?;
    }
    // The file of a running program cannot be written to, but it can be replaced.
    let draft = to.with_extension("new");
    fs::copy(from, &draft)
        .and_then(|_| fs::rename(&draft, to))
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}
