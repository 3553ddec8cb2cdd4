//! `cargo xtask setup`: what the kernel side is built with.
//! The one rule: what is there is used, what is missing is fetched, and a second run finds nothing to do.
//!
//! The kernel side needs `core` compiled for a machine that has no ready-made one, so it takes a compiler together with
//! the very sources it was built from, and `bpf-linker`, which borrows that compiler's LLVM.

use std::{
    env, fs,
    io::Read as _,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::command::{attempt, cargo, find, output, run, say, workspace};

/// The version that is installed where there is none; any other of its series does as well.
const LINKER: &str = "0.10.3";
const LINKER_SERIES: &str = "0.10.";
/// The LLVM that this series of the linker reads and calls.
const LLVM: &str = "22";
/// Debian's compiler, its cargo and its sources, kept in step by the distribution.
const DEBIAN: [&str; 3] = ["rustc-web", "cargo-web", "rust-web-src"];
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// Everything that builds a kernel object.
pub(crate) struct Toolchain {
    pub(crate) cargo: PathBuf,
    pub(crate) rustc: PathBuf,
    pub(crate) linker: PathBuf,
    /// A folder with the compiler's LLVM and nothing else, for the linker to search.
    pub(crate) llvm: PathBuf,
}

/// Finds or fetches the toolchain of the kernel side.
pub(crate) fn setup() -> Result<Toolchain> {
    let compiler = compiler()?;
    let linker = linker()?;
    let llvm = lay_out_llvm(&compiler.llvm)?;
    Ok(Toolchain { cargo: compiler.cargo, rustc: compiler.rustc, linker, llvm })
}

/// Finds or fetches a program that comes with a Debian package.
pub(crate) fn tool(program: &str, package: &str) -> Result<PathBuf> {
    if let Some(path) = find(program) {
        return Ok(path);
    }
    apt_install(&[package]).with_context(|| {
        format!("`{program}` is missing: install it (package `{package}` on Debian and Ubuntu)")
    })?;
    find(program).with_context(|| format!("`{program}` is still missing after installing `{package}`"))
}

/// A compiler that has its sources beside it.
struct Compiler {
    cargo: PathBuf,
    rustc: PathBuf,
    llvm: PathBuf,
}

fn compiler() -> Result<Compiler> {
    let current = env::var_os("RUSTC").map_or_else(|| PathBuf::from("rustc"), PathBuf::from);
    let debian = Path::new(DEBIAN_RUSTC);

    let mut reason = match inspect(&current) {
        Ok(found) => return Ok(found),
        Err(reason) => reason,
    };
    if let Ok(found) = inspect(debian) {
        say("Using", &format!("{DEBIAN_RUSTC} for the kernel side: {reason:#}"));
        return Ok(found);
    }
    if find("rustup").is_some() {
        say("Fetching", "the compiler's sources (rustup component add rust-src)");
        match rustup_add_sources().and_then(|()| inspect(&current)) {
            Ok(found) => return Ok(found),
            Err(error) => {
                say("No luck", &format!("{error:#}"));
                reason = error;
            }
        }
    }
    apt_install(&DEBIAN).and_then(|()| inspect(debian)).map_err(|error| {
        anyhow!(
            "the kernel side needs a Rust compiler with its sources and LLVM {LLVM}.\n\
             Neither is {} one: {reason:#}\n\
             nor is Debian's: {error:#}\n\
             Remedy: `rustup component add rust-src`, or on Debian `apt-get install {}`.",
            current.display(),
            DEBIAN.join(" "),
        )
    })
}

/// What `rustc` lacks to build the kernel side, or everything it brings.
fn inspect(rustc: &Path) -> Result<Compiler> {
    let ask = |args: &[&str]| output(Command::new(rustc).args(args).current_dir(workspace()));
    let sysroot = PathBuf::from(ask(&["--print", "sysroot"])?);
    let about = ask(&["-vV"])?;
    let field = |name: &str| about.lines().find_map(|it| it.strip_prefix(name)).map(str::trim);

    let llvm_version = field("LLVM version:").context("`rustc -vV` names no LLVM version")?;
    if llvm_version.split('.').next() != Some(LLVM) {
        bail!("{} has LLVM {llvm_version}, bpf-linker {LINKER_SERIES}x reads LLVM {LLVM}", rustc.display());
    }
    let sources = sysroot.join("lib/rustlib/src/rust/library/core/src/lib.rs");
    if !sources.exists() {
        bail!("{} comes without its sources (rust-src)", rustc.display());
    }
    let llvm = find_llvm(&sysroot).with_context(|| {
        format!("no shared LLVM {LLVM} under {} or the system's library folders", sysroot.display())
    })?;
    let beside = |name: &str| sysroot.join("bin").join(name);
    if !beside("cargo").exists() || !beside("rustc").exists() {
        bail!("{} has no cargo or rustc", sysroot.join("bin").display());
    }
    Ok(Compiler { cargo: beside("cargo"), rustc: beside("rustc"), llvm })
}

/// The shared library itself, not one of the linker scripts that go by its name.
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
        let named = file.file_name().to_str().is_some_and(|it| names.iter().any(|name| it.starts_with(name)));
        (named && is_elf(&file.path())).then(|| file.path())
    })
}

fn is_elf(file: &Path) -> bool {
    let mut magic = [0; 4];
    fs::File::open(file).and_then(|mut it| it.read_exact(&mut magic)).is_ok() && magic == *b"\x7fELF"
}

/// The linker loads the first `libLLVM*` of the folder it searches, whatever its version: it gets a folder with one.
fn lay_out_llvm(library: &Path) -> Result<PathBuf> {
    let folder = workspace().join("target/tools/llvm");
    let name = library.file_name().context("a library has a name")?;
    let link = folder.join(name);
    let alone = fs::read_dir(&folder).is_ok_and(|it| it.count() == 1);
    if !alone || fs::read_link(&link).ok().as_deref() != Some(library) {
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder)
            .and_then(|()| symlink(library, &link))
            .with_context(|| format!("cannot link {} to {}", link.display(), library.display()))?;
    }
    Ok(folder)
}

fn rustup_add_sources() -> Result<()> {
    let mut command = Command::new("rustup");
    command.args(["component", "add", "rust-src"]).current_dir(workspace());
    // Without a network one look is enough.
    command.env("RUSTUP_MAX_RETRIES", "0").env("RUST_BACKTRACE", "0");
    attempt(&mut command, Duration::from_secs(120))
}

fn linker() -> Result<PathBuf> {
    let private = workspace().join("target/tools/bin/bpf-linker");
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| env::home_dir().map(|it| it.join(".cargo"))).unwrap_or_default();

    let known = [find("bpf-linker"), Some(home.join("bin/bpf-linker")), Some(private.clone())];
    let mut other = None;
    for path in known.into_iter().flatten().filter(|it| it.exists()) {
        let version = output(Command::new(&path).arg("--version"))?;
        if version.split_whitespace().any(|it| it.starts_with(LINKER_SERIES)) {
            return Ok(path);
        }
        other = Some(version);
    }
    say("Installing", &format!("bpf-linker {LINKER}, once per machine (about 90 s on two cores)"));
    let mut install = cargo();
    install.args(["install", "bpf-linker", "--version", LINKER, "--locked"]);
    // What is compiled here is an ordinary program of the host.
    install.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS").env_remove("CARGO_TARGET_DIR");
    let installed = if let Some(version) = other {
        say("Keeping", &format!("{version}, ours goes to target/tools"));
        install.arg("--root").arg(workspace().join("target/tools"));
        private
    } else {
        home.join("bin/bpf-linker")
    };
    run(&mut install)?;
    if !installed.exists() {
        bail!("`cargo install bpf-linker` left no {}: is CARGO_INSTALL_ROOT set?", installed.display());
    }
    Ok(installed)
}

fn apt_install(packages: &[&str]) -> Result<()> {
    if find("apt-get").is_none() {
        bail!("there is no `apt-get` here to install {} with", packages.join(" "));
    }
    if output(Command::new("id").arg("-u"))? != "0" {
        bail!("only root can run `apt-get install {}`", packages.join(" "));
    }
    say("Installing", &format!("{} (apt-get)", packages.join(" ")));
    let apt = || {
        let mut command = Command::new("apt-get");
        command.args(["-q", "-y"]).env("DEBIAN_FRONTEND", "noninteractive");
        command
    };
    // Old lists often do; if they don't, the install says so.
    if let Err(error) = run(apt().arg("update")) {
        say("Warning", &format!("{error:#}"));
    }
    run(apt().args(["install", "--no-install-recommends"]).args(packages))
}
