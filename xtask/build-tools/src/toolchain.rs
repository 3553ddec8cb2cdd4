//! The toolchain of the kernel object: found, or installed where it is missing.
//!
//! The object needs `core` compiled for a target without a prebuilt one, so it takes a compiler with exactly the sources
//! it was built from, and `bpf-linker`, which loads that compiler's LLVM.

use std::{
    env, fs,
    io::Read as _,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::{
    command::{cargo_home, output, run, status, workspace},
    empty_folder,
    programs::{apt_install, cargo_install, find},
};

/// The version that is installed where none of its series is.
const LINKER: &str = "0.10.3";
const LINKER_SERIES: &str = "0.10.";
/// The LLVM that this series of the linker supports.
const LLVM: &str = "22";
/// Debian's compiler, its cargo and its sources: packages that the distribution keeps at one version.
const DEBIAN: [&str; 3] = ["rustc-web", "cargo-web", "rust-web-src"];
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
/// In seconds.
const RUSTUP_TIMEOUT: &str = "120";

/// Everything that builds a kernel object.
#[derive(Debug)]
pub struct Toolchain {
    pub(crate) cargo: PathBuf,
    /// The compiler, which has its sources.
    pub rustc: PathBuf,
    /// `bpf-linker`.
    pub linker: PathBuf,
    /// A folder with the compiler's LLVM and nothing else, for the linker to search.
    pub(crate) llvm: PathBuf,
}

impl Toolchain {
    /// Finds the toolchain, or installs what is missing of it; the error contains the remedy.
    pub fn find_or_install() -> Result<Self> {
        let Compiler { cargo, rustc, llvm } = compiler()?;
        Ok(Self { cargo, rustc, linker: linker()?, llvm: lay_out_llvm(&llvm)? })
    }
}

/// A compiler with its sources.
struct Compiler {
    cargo: PathBuf,
    rustc: PathBuf,
    /// The library with the compiler's LLVM.
    llvm: PathBuf,
}

fn compiler() -> Result<Compiler> {
    let current = current_rustc();
    let debian = Path::new(DEBIAN_RUSTC);

    let mut reason = match inspect(&current) {
        Ok(found) => return Ok(found),
        Err(reason) => reason,
    };
    if let Ok(found) = inspect(debian) {
        status("Using", &format!("{DEBIAN_RUSTC} for the kernel object: {reason:#}"));
        return Ok(found);
    }
    if find("rustup").is_some() {
        status("Fetching", "the compiler's sources (rustup component add rust-src)");
        match rustup(&["component", "add", "rust-src"]).and_then(|()| inspect(&current)) {
            Ok(found) => return Ok(found),
            Err(error) => {
                status("Failed", &format!("{error:#}"));
                reason = error;
            }
        }
    }
    apt_install(&DEBIAN).and_then(|()| inspect(debian)).map_err(|error| {
        anyhow!(
            "the kernel object needs a Rust compiler with its sources and LLVM {LLVM}.\n\
             {} does not qualify: {reason:#}\n\
             Debian's does not either: {error:#}\n\
             Remedy: `rustup component add rust-src`, or on Debian `apt-get install {}`.",
            current.display(),
            DEBIAN.join(" "),
        )
    })
}

/// The compiler that cargo would take.
pub(crate) fn current_rustc() -> PathBuf {
    env::var_os("RUSTC").map_or_else(|| PathBuf::from("rustc"), PathBuf::from)
}

/// The parts of a compiler that builds the kernel object; the error says what it lacks.
fn inspect(rustc: &Path) -> Result<Compiler> {
    let ask = |args: &[&str]| output(Command::new(rustc).args(args).current_dir(workspace()));
    let sysroot = PathBuf::from(ask(&["--print", "sysroot"])?);
    let version = ask(&["-vV"])?;
    let field = |name: &str| version.lines().find_map(|it| it.strip_prefix(name)).map(str::trim);

    let llvm_version = field("LLVM version:").context("`rustc -vV` prints no LLVM version")?;
    if llvm_version.split('.').next() != Some(LLVM) {
        bail!(
            "{} has LLVM {llvm_version}, and bpf-linker {LINKER_SERIES}x needs LLVM {LLVM}",
            rustc.display()
        );
    }
    let sources = sysroot.join("lib/rustlib/src/rust/library/core/src/lib.rs");
    if !sources.exists() {
        bail!("{} has no sources (rust-src)", rustc.display());
    }
    let llvm = find_llvm(&sysroot).with_context(|| {
        format!("no shared LLVM {LLVM} below {} or in the system's library folders", sysroot.display())
    })?;
    let bin = sysroot.join("bin");
    let (cargo, rustc) = (bin.join("cargo"), bin.join("rustc"));
    if !cargo.exists() || !rustc.exists() {
        bail!("{} has no cargo or rustc", bin.display());
    }
    Ok(Compiler { cargo, rustc, llvm })
}

/// The shared library itself, not one of the linker scripts of the same name.
fn find_llvm(sysroot: &Path) -> Option<PathBuf> {
    let multiarch = format!("lib/{}-linux-gnu", env::consts::ARCH);
    let usr = Path::new("/usr");
    let folders = [
        sysroot.join("lib"),
        sysroot.join(&multiarch),
        sysroot.join("lib64"),
        usr.join(&multiarch),
        usr.join(format!("lib/llvm-{LLVM}/lib")),
        usr.join("lib64"),
        usr.join("lib"),
    ];
    let names = [format!("libLLVM.so.{LLVM}"), format!("libLLVM-{LLVM}")];
    let mut files = folders.iter().filter_map(|it| fs::read_dir(it).ok()).flatten().flatten();
    files.find_map(|file| {
        let is_named =
            file.file_name().to_str().is_some_and(|it| names.iter().any(|name| it.starts_with(name)));
        (is_named && is_elf(&file.path())).then(|| file.path())
    })
}

fn is_elf(file: &Path) -> bool {
    let mut magic = [0; 4];
    fs::File::open(file).and_then(|mut it| it.read_exact(&mut magic)).is_ok() && magic == *b"\x7fELF"
}

/// The linker loads the first `libLLVM*` of the folder it searches, whatever its version: this folder has exactly one.
fn lay_out_llvm(library: &Path) -> Result<PathBuf> {
    let folder = workspace().join("target/tools/llvm");
    let link = folder.join(library.file_name().context("a library has a name")?);
    let is_alone = fs::read_dir(&folder).is_ok_and(|it| it.count() == 1);
    if !is_alone || fs::read_link(&link).ok().as_deref() != Some(library) {
        empty_folder(&folder)?;
        symlink(library, &link)
            .with_context(|| format!("cannot link {} to {}", link.display(), library.display()))?;
    }
    Ok(folder)
}

/// Runs rustup, which may go online.
pub(crate) fn rustup(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("timeout");
    command.args([RUSTUP_TIMEOUT, "rustup"]).args(arguments).current_dir(workspace());
    // Without a network, retries only take time.
    command.env("RUSTUP_MAX_RETRIES", "0").env("RUST_BACKTRACE", "0");
    output(&mut command).map(drop)
}

fn linker() -> Result<PathBuf> {
    let private = workspace().join("target/tools/bin/bpf-linker");
    let home = cargo_home().unwrap_or_default();

    let candidates = [find("bpf-linker"), Some(home.join("bin/bpf-linker")), Some(private.clone())];
    let mut other = None;
    for path in candidates.into_iter().flatten().filter(|it| it.exists()) {
        let version = output(Command::new(&path).arg("--version"))?;
        if version.split_whitespace().any(|it| it.starts_with(LINKER_SERIES)) {
            return Ok(path);
        }
        other = Some(version);
    }
    status("Installing", &format!("bpf-linker {LINKER}, once per machine (about 30 s on two cores)"));
    // LLVM does the work: optimizing what calls it takes longer than it saves.
    let mut install = cargo_install("bpf-linker", LINKER);
    let installed = if let Some(version) = other {
        status("Keeping", &format!("{version}; bpf-linker {LINKER} goes to target/tools"));
        install.arg("--root").arg(workspace().join("target/tools"));
        private
    } else {
        home.join("bin/bpf-linker")
    };
    run(&mut install)?;
    if !installed.exists() {
        bail!(
            "`cargo install bpf-linker` did not create {}: is CARGO_INSTALL_ROOT set?",
            installed.display()
        );
    }
    Ok(installed)
}
