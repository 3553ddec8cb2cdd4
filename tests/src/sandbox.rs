//! A child cgroup, a folder for pins and a folder for files, all of one name.
//! The one rule: dropping it leaves no trace, and what a killed run left is swept by the next.

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process, thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::requirements::{Host, requirements};

/// All sandboxes are named like this, then comes the test's name, then the owner's process id.
/// No dots: a BPF file system refuses them.
const PREFIX: &str = "kpe-sandbox-";
/// Where a BPF file system is mounted by custom.
const BPFFS: &str = "/sys/fs/bpf";
/// The file that says who keeps a sandbox up after its owner's death.
const KEEPER: &str = "keeper";

/// A place to run a proxy in without touching the machine's own traffic.
#[derive(Debug)]
pub struct Sandbox {
    name: String,
    cgroup: PathBuf,
    pins: PathBuf,
    files: PathBuf,
    kept: bool,
}

impl Sandbox {
    /// Makes a sandbox.
    ///
    /// # Errors
    ///
    /// If a requirement is missing or a folder cannot be made.
    pub fn new(name: &str) -> Result<Self> {
        let machine = requirements().map_err(|missing| {
            let lines: Vec<_> = missing.iter().map(ToString::to_string).collect();
            anyhow::anyhow!("this machine lacks something:\n{}", lines.join("\n"))
        })?;
        if name.is_empty() || !name.bytes().all(|it| it.is_ascii_alphanumeric() || it == b'_' || it == b'-') {
            bail!("a sandbox cannot be named {name:?}: use letters, digits, `-` and `_`");
        }
        remove_stale(&machine, false);
        let sandbox = Self::of(&machine, format!("{PREFIX}{name}-{}", process::id()))?;
        for folder in [&sandbox.cgroup, &sandbox.pins, &sandbox.files] {
            fs::create_dir(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        Ok(sandbox)
    }

    /// Makes a sandbox, or says why the test that wants it is skipped.
    ///
    /// # Panics
    ///
    /// If the machine has everything and it still fails.
    #[must_use]
    pub fn or_skip(name: &str) -> Option<Self> {
        if let Err(missing) = requirements() {
            let reasons: Vec<_> = missing.iter().map(ToString::to_string).collect();
            skip(name, &reasons.join("; "));
            return None;
        }
        Some(Self::new(name).expect("the machine has everything a sandbox needs"))
    }

    fn of(machine: &Host, name: String) -> Result<Self> {
        let bpffs = match &machine.bpffs {
            Some(path) => path.clone(),
            None => mount_bpffs()?,
        };
        let files = std::env::temp_dir().join(&name);
        Ok(Self { cgroup: machine.cgroup2.join(&name), pins: bpffs.join(&name), files, name, kept: false })
    }

    /// Its name, unique on this machine.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The child cgroup: the value of `--cgroup`.
    #[must_use]
    pub fn cgroup(&self) -> &Path {
        &self.cgroup
    }

    /// The folder for pins: the value of `--pin-dir`.
    #[must_use]
    pub fn pins(&self) -> &Path {
        &self.pins
    }

    /// A folder for ordinary files.
    #[must_use]
    pub fn files(&self) -> &Path {
        &self.files
    }

    /// Moves this process, all its threads, into the cgroup until the guard is dropped.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn enter(&self) -> Result<CgroupGuard> {
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let own = own.lines().find_map(|it| it.strip_prefix("0::/")).unwrap_or_default();
        let home = self.cgroup.parent().context("a cgroup has a parent")?.join(own);
        self.adopt(process::id())?;
        Ok(CgroupGuard { home })
    }

    /// Has this process, all its threads, call from the root of the hierarchy until the guard is dropped. The sockets
    /// that it has stay the sandbox's.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn call_from_root(&self) -> Result<CgroupGuard> {
        let root = self.cgroup.parent().context("a cgroup has a parent")?;
        move_to(root, process::id())?;
        Ok(CgroupGuard { home: self.cgroup.clone() })
    }

    /// Moves another process into the cgroup. It dies with the sandbox.
    ///
    /// # Errors
    ///
    /// If there is no such process.
    pub fn adopt(&self, process: u32) -> Result<()> {
        move_to(&self.cgroup, process)
    }

    /// Leaves the sandbox up when its owner ends, as long as the process `keeper` lives.
    ///
    /// # Errors
    ///
    /// If that cannot be written down.
    pub fn keep(mut self, keeper: u32) -> Result<()> {
        let note = self.files.join(KEEPER);
        fs::write(&note, keeper.to_string()).with_context(|| format!("cannot write {}", note.display()))?;
        self.kept = true;
        Ok(())
    }

    fn remove(&self) -> Result<()> {
        // What lives in a cgroup keeps it; what is pinned keeps the programs attached.
        for _ in 0..100 {
            if empty(&self.cgroup)? {
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
        remove_tree(&self.pins)?;
        remove_tree(&self.files)?;
        for _ in 0..100 {
            match fs::remove_dir(&self.cgroup) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    thread::sleep(Duration::from_millis(10));
                }
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("cannot remove {}", self.cgroup.display()));
                }
                _ => return Ok(()),
            }
        }
        bail!("cannot remove {}: it stays busy", self.cgroup.display())
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        if let Err(error) = self.remove() {
            eprintln!("warning: the sandbox {} is not gone: {error:#}", self.name);
        }
    }
}

/// This process is in another cgroup than before.
#[derive(Debug)]
#[must_use = "the process goes back when this is dropped"]
pub struct CgroupGuard {
    home: PathBuf,
}

impl Drop for CgroupGuard {
    fn drop(&mut self) {
        if let Err(error) = move_to(&self.home, process::id()) {
            eprintln!("warning: {error:#}");
        }
    }
}

pub use build_tools::SKIPPED_TESTS_FILE;

/// Says that a test is skipped, past the test runner, which keeps to itself what a passing test prints.
pub fn skip(test: &str, reason: &str) {
    let line = format!("skipped: {test}: {reason}\n");
    // There is nobody to tell if this fails.
    let _ = io::stderr().write_all(line.as_bytes());
    if let Some(file) = std::env::var_os(SKIPPED_TESTS_FILE) {
        let file = fs::OpenOptions::new().create(true).append(true).open(file);
        let _ = file.and_then(|mut it| it.write_all(line.as_bytes()));
    }
}

/// Removes the sandboxes whose owner is dead, `kept` ones too if asked for, and gives back their names.
pub fn remove_stale(machine: &Host, kept: bool) -> Vec<String> {
    let mut swept = Vec::new();
    for entry in fs::read_dir(&machine.cgroup2).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let owner = name.strip_prefix(PREFIX).and_then(|it| it.rsplit('-').next()?.parse().ok());
        let Some(owner) = owner else { continue };
        if alive(owner) {
            continue;
        }
        let Ok(sandbox) = Sandbox::of(machine, name.clone()) else { continue };
        let keeper = fs::read_to_string(sandbox.files.join(KEEPER)).ok();
        if !kept && keeper.and_then(|it| it.parse().ok()).is_some_and(alive) {
            // Not ours to drop.
            std::mem::forget(sandbox);
            continue;
        }
        swept.push(name);
    }
    swept
}

fn alive(process: u32) -> bool {
    Path::new("/proc").join(process.to_string()).exists()
}

fn mount_bpffs() -> Result<PathBuf> {
    mount(Some("bpf"), BPFFS, Some("bpf"), MsFlags::empty(), None::<&str>)
        .with_context(|| format!("cannot mount a BPF file system: try `mount -t bpf bpf {BPFFS}`"))?;
    Ok(PathBuf::from(BPFFS))
}

fn move_to(cgroup: &Path, process: u32) -> Result<()> {
    let file = cgroup.join("cgroup.procs");
    fs::write(&file, process.to_string())
        .with_context(|| format!("cannot write process {process} to {}", file.display()))
}

/// Kills what lives in the cgroup, or, if that is us, moves it up. Says whether there was nobody.
fn empty(cgroup: &Path) -> Result<bool> {
    let Ok(members) = fs::read_to_string(cgroup.join("cgroup.procs")) else { return Ok(true) };
    for member in members.lines() {
        let member: u32 = member.parse().with_context(|| format!("process id {member:?}"))?;
        if member == process::id() {
            move_to(cgroup.parent().context("a cgroup has a parent")?, member)?;
            continue;
        }
        match kill(Pid::from_raw(member.cast_signed()), Signal::SIGKILL) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(error) => return Err(error).with_context(|| format!("cannot kill process {member}")),
        }
    }
    Ok(members.is_empty())
}

fn remove_tree(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}
