//! The programs of a virtual machine's user space: those of this machine, or for another machine Debian's packages and
//! what is built for it.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use build_tools::{
    apt::Apt,
    build::{backend_binary, build_for_tests, build_for_tests_on},
    command::{output, run, status, workspace},
    machine::Machine,
    programs::{TEST_PROGRAMS, find_or_install, test_programs},
    target::Target,
};

/// The suite of another machine's programs: its C library is at least as new as the one that is linked here.
const SUITE: (&str, &str) = ("Debian", "trixie");
/// A browser is too large for a root in memory.
const TOO_LARGE: [&str; 2] = ["chromium", "chromium-driver"];
/// The backend whose tests need another kernel than most machines have.
const BACKEND: &str = "kube-proxy-ipvs";
/// The folders of programs and of libraries in Debian's packages.
const PROGRAM_FOLDERS: [&str; 4] = ["usr/bin", "usr/sbin", "bin", "sbin"];

/// Programs, and where their libraries are.
pub(crate) struct System {
    /// Files of this machine, and their paths in the virtual machine.
    pub(crate) programs: Vec<(PathBuf, PathBuf)>,
    other: Option<Other>,
}

/// Another machine than this one.
struct Other {
    machine: Machine,
    target: Target,
    /// The folder with its packages.
    root: PathBuf,
}

impl System {
    /// The programs of this machine, which are built or installed where they are missing.
    pub(crate) fn own() -> Result<Self> {
        build_for_tests()?;
        let mut programs = test_programs();
        programs.retain(|it| !TOO_LARGE.iter().any(|large| it.ends_with(large)));
        let mut programs: Vec<_> = programs.into_iter().map(|it| (it.clone(), it)).collect();
        for build in fs::read_dir(workspace().join("target/test-binaries"))?.flatten() {
            let binary = build.path().join("kube-proxy-ebpf");
            programs.push((binary.clone(), binary));
        }
        programs.push((backend_binary(BACKEND), backend_binary(BACKEND)));
        programs.push((env::current_exe()?, "/guest".into()));
        programs.extend(iptables_extensions(Path::new("/"), Machine::own()?));
        Ok(Self { programs, other: None })
    }

    /// The programs of another machine.
    pub(crate) fn of(machine: Machine) -> Result<Self> {
        let target = Target::find_or_install(machine)?;
        let root = packages(machine)?;
        let mut programs = build_for_tests_on(&target)?;
        let packages = ["--locked", "--package", "vmtest", "--package", BACKEND];
        run(target.cargo("build", &[]).args(packages))?;
        programs.push((target.folder("debug").join("vmtest"), "/guest".into()));
        programs.push((target.folder("debug").join(BACKEND), backend_binary(BACKEND)));
        for (program, _) in TEST_PROGRAMS {
            if let Some(path) = find_below(&root, program) {
                programs.push((path, Path::new("/usr/bin").join(program)));
            }
        }
        programs.extend(iptables_extensions(&root, machine));
        Ok(Self { programs, other: Some(Other { machine, target, root }) })
    }

    /// What builds for it, if it is not this machine.
    pub(crate) fn target(&self) -> Option<&Target> {
        self.other.as_ref().map(|it| &it.target)
    }

    /// A busybox that needs no library.
    pub(crate) fn busybox(&self) -> Result<PathBuf> {
        match &self.other {
            None => find_or_install("busybox", "busybox-static"),
            Some(it) => find_below(&it.root, "busybox").context("busybox-static contains no busybox"),
        }
    }

    /// The program that removes debug information.
    pub(crate) fn strip(&self) -> String {
        match &self.other {
            None => "strip".to_owned(),
            Some(other) => format!("{}-linux-gnu-strip", other.machine.name()),
        }
    }

    /// The libraries that the dynamic linker loads for a program, itself included, and their paths in the virtual machine.
    /// None for a static program.
    pub(crate) fn libraries(&self, program: &Path) -> Result<Vec<(PathBuf, PathBuf)>> {
        let Some(Other { machine, root, .. }) = &self.other else {
            let output = Command::new("ldd").arg(program).output().context("cannot start `ldd`")?;
            // It fails for a static program.
            let paths = parse_ldd(&String::from_utf8_lossy(&output.stdout));
            return Ok(paths.into_iter().map(|it| (it.clone(), it)).collect());
        };
        let multiarch = format!("{}-linux-gnu", machine.name());
        let folders = ["usr/lib", "lib"].map(|it| root.join(it));
        let (mut found, mut queue) = (Vec::new(), needed(program)?);
        while let Some(name) = queue.pop() {
            let path = Path::new("/lib").join(&multiarch).join(&name);
            if found.iter().any(|(_, it)| *it == path) {
                continue;
            }
            let mut files = folders.iter().flat_map(|it| [it.join(&multiarch).join(&name), it.join(&name)]);
            let file = files.find(|it| it.exists());
            let file = file.with_context(|| {
                format!("{} needs {name}, which no package in {} has", program.display(), root.display())
            })?;
            queue.extend(needed(&file)?);
            // The dynamic linker itself is named by its path.
            let path = if name.starts_with("ld-linux") { Path::new("/lib").join(&name) } else { path };
            found.push((file, path));
        }
        Ok(found)
    }
}

/// Fetches the packages with the programs of another machine, unless they are there.
fn packages(machine: Machine) -> Result<PathBuf> {
    let folder = workspace().join("target/vmtest").join(format!("system-{}", machine.debian()));
    let (root, complete) = (folder.join("root"), folder.join("complete"));
    if !complete.exists() {
        let mut packages = vec!["busybox-static", "libgcc-s1"];
        packages.extend(TEST_PROGRAMS.map(|(_, it)| it).into_iter().filter(|it| !TOO_LARGE.contains(it)));
        packages.dedup();
        status("Fetching", &format!("programs for {} (Debian's {})", machine.name(), SUITE.1));
        let apt = Apt::open(Some(machine), folder.join("apt"), &[SUITE])?;
        apt.unpack_with_dependencies(&packages, &root)?;
        fs::write(complete, "")?;
    }
    Ok(root)
}

/// What iptables loads for the matches and targets of its rules: files below a root, and their paths there.
fn iptables_extensions(root: &Path, machine: Machine) -> Vec<(PathBuf, PathBuf)> {
    let folder = format!("usr/lib/{}-linux-gnu/xtables", machine.name());
    // Without them only the tests with rules of iptables fail.
    let files = fs::read_dir(root.join(&folder)).into_iter().flatten().flatten();
    files.map(|it| (it.path(), Path::new("/").join(&folder).join(it.file_name()))).collect()
}

fn find_below(root: &Path, program: &str) -> Option<PathBuf> {
    PROGRAM_FOLDERS.iter().map(|it| root.join(it).join(program)).find(|it| it.exists())
}

/// The names of the libraries that a program or library names, and of its dynamic linker.
fn needed(file: &Path) -> Result<Vec<String>> {
    let text = output(Command::new("readelf").args(["--dynamic", "--program-headers", "--wide"]).arg(file))?;
    Ok(parse_readelf(&text))
}

fn parse_readelf(text: &str) -> Vec<String> {
    let name = |line: &str| {
        if line.contains("(NEEDED)") {
            return line.split_once('[')?.1.split(']').next().map(ToOwned::to_owned);
        }
        let path = line.split_once("[Requesting program interpreter: ")?.1.split(']').next()?;
        Some(path.rsplit('/').next()?.to_owned())
    };
    text.lines().filter_map(name).collect()
}

fn parse_ldd(text: &str) -> Vec<PathBuf> {
    let path = |line: &str| {
        let line = line.trim().split(" (").next()?;
        let path = line.rsplit(" => ").next()?;
        path.starts_with('/').then(|| PathBuf::from(path))
    };
    text.lines().filter_map(path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_from_the_output_of_ldd() {
        let text = "\tlinux-vdso.so.1 (0x00007f01)\n\
                    \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f02)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f03)\n";
        assert_eq!(
            parse_ldd(text),
            [Path::new("/lib/x86_64-linux-gnu/libc.so.6"), Path::new("/lib64/ld-linux-x86-64.so.2")]
        );
        assert!(parse_ldd("\tnot a dynamic executable\n").is_empty());
    }

    #[test]
    fn libraries_of_another_machine_are_read_from_the_output_of_readelf() {
        let text = "  INTERP  0x000238 0x0000000000000238 0x0000000000000238 0x00001b 0x00001b R   0x1\n\
                    \x20     [Requesting program interpreter: /lib/ld-linux-aarch64.so.1]\n\
                    \x20 LOAD    0x000000 0x0000000000000000 0x0000000000000000 0x1f4a0 0x1f4a0 R E 0x10000\n\
                    \x20 0x0000000000000001 (NEEDED)             Shared library: [libgcc_s.so.1]\n\
                    \x20 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]\n\
                    \x20 0x000000000000000e (SONAME)             Library soname: [libnftables.so.1]\n";
        assert_eq!(parse_readelf(text), ["ld-linux-aarch64.so.1", "libgcc_s.so.1", "libc.so.6"]);
    }
}
