//! What builds programs of user space for a machine: the standard library of that machine, and for another machine than
//! this one a C compiler, which also links.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{
    command::{cargo, cross_cargo, output, status, workspace},
    machine::Machine,
    programs::{apt_install, find},
    toolchain::{Toolchain, current_rustc, rustup},
};

/// What builds programs of user space for a machine.
#[derive(Debug)]
pub struct Target {
    machine: Machine,
    /// The C compiler.
    linker: PathBuf,
    /// What compiles the standard library from its sources, if it is not installed beside that of the compiler.
    from_sources: Option<Toolchain>,
}

impl Target {
    /// Finds what builds for a machine, or installs what is missing of it; the error contains the remedy.
    ///
    /// The standard library of another machine comes from rustup; without rustup or a network it is compiled from the
    /// sources that the kernel object needs, too. Its C compiler is Debian's.
    pub fn find_or_install(machine: Machine) -> Result<Self> {
        let is_own = Machine::own()? == machine;
        let prefix = if is_own { String::new() } else { format!("{}-linux-gnu-", machine.name()) };
        let linker = if is_own { find("cc") } else { find(&format!("{prefix}gcc")) };
        let linker = match linker {
            Some(linker) => linker,
            None if is_own => bail!("`cc` is missing: install a C compiler (package gcc)"),
            None => {
                let compiler = format!("gcc-{}-linux-gnu", machine.name().replace('_', "-"));
                let library = format!("libc6-dev-{}-cross", machine.debian());
                apt_install(&[&compiler, &library]).with_context(|| {
                    format!(
                        "`{prefix}gcc` is missing: install it (package `{compiler}` on Debian and Ubuntu)"
                    )
                })?;
                find(&format!("{prefix}gcc")).with_context(|| format!("{compiler} has no `{prefix}gcc`"))?
            }
        };
        let is_installed = is_own || is_installed(machine.target())?;
        let from_sources = (!is_installed).then(Toolchain::find_or_install).transpose()?;
        Ok(Self { machine, linker, from_sources })
    }

    /// `cargo SUBCOMMAND` for this machine, with these flags for the compiler if there are any.
    pub fn cargo(&self, subcommand: &str, flags: &[String]) -> Command {
        let target = self.machine.target();
        let mut command = self.from_sources.as_ref().map_or_else(cargo, |it| cross_cargo(&it.cargo));
        command.args([subcommand, "--target", target]);
        if let Some(toolchain) = &self.from_sources {
            command.env("RUSTC", &toolchain.rustc).env("RUSTC_BOOTSTRAP", "1").args(["-Z", "build-std=std"]);
        }
        let variable = target.replace('-', "_");
        command.env(format!("CARGO_TARGET_{}_LINKER", variable.to_uppercase()), &self.linker);
        command.env(format!("CC_{variable}"), &self.linker);
        if !flags.is_empty() {
            command.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f")).env_remove("RUSTFLAGS");
        }
        command.arg("--target-dir").arg(workspace().join("target"));
        command
    }

    /// The folder of what [`Self::cargo`] builds in a profile, `debug` or `release`.
    pub fn folder(&self, profile: &str) -> PathBuf {
        workspace().join("target").join(self.machine.target()).join(profile)
    }

    /// Where the standard library comes from, for the provenance.
    pub fn standard_library(&self) -> &'static str {
        if self.from_sources.is_none() { "of the compiler" } else { "compiled from the compiler's sources" }
    }

    pub fn rustc(&self) -> PathBuf {
        self.from_sources.as_ref().map_or_else(current_rustc, |it| it.rustc.clone())
    }

    /// Fails if the C library cannot be linked statically.
    pub(crate) fn check_static(&self) -> Result<()> {
        let library = output(Command::new(&self.linker).arg("-print-file-name=libc.a"))?;
        // It prints the bare name of a file that it does not find.
        ensure!(
            library.starts_with('/'),
            "{} has no libc.a, for a binary that runs on every node: install it (package libc6-dev on Debian and \
             Ubuntu, glibc-static on Fedora)",
            self.linker.display()
        );
        Ok(())
    }
}

/// Finds the standard library of a target, or fetches it; fails if rustup is missing, too.
pub(crate) fn require_standard_library(target: &str) -> Result<()> {
    ensure!(
        is_installed(target)?,
        "the standard library of {target} is missing: install it (`rustup target add {target}`)"
    );
    Ok(())
}

/// Whether the compiler has a standard library of a target; fetches it if rustup can.
fn is_installed(target: &str) -> Result<bool> {
    let print = ["--print", "target-libdir", "--target", target];
    let folder = output(Command::new(current_rustc()).args(print).current_dir(workspace()))?;
    let is_installed = || fs::read_dir(&folder).is_ok_and(|mut it| it.next().is_some());
    if is_installed() {
        return Ok(true);
    }
    if find("rustup").is_some() {
        status("Fetching", &format!("the standard library of {target} (rustup target add)"));
        match rustup(&["target", "add", target]) {
            // The compiler may be another one than rustup's.
            Ok(()) => return Ok(is_installed()),
            Err(error) => status("Failed", &format!("{error:#}")),
        }
    }
    Ok(false)
}
