//! A child cgroup, a pin folder and a folder for files, all of one name.
//!
//! Dropping a sandbox removes all of it; what a killed process left behind is removed when the next sandbox is made. An
//! error names the file that the kernel did not let us write or remove.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    eventually,
    requirements::{Host, requirements},
    skip::{current_test, skip},
};

/// A sandbox's name: this, its test's name, and its owner's process id. A BPF file system refuses dots.
const PREFIX: &str = "kpe-sandbox-";
/// The longest name of a test in a sandbox's name: the path of a Unix socket inside must be shorter than 108 bytes.
const MAX_NAME: usize = 45;
/// How long the kernel may take to end the processes of a cgroup, and then to let it be removed.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(1);
/// Where a BPF file system is usually mounted.
const BPFFS: &str = "/sys/fs/bpf";

/// A place to run a proxy without touching the machine's own traffic.
#[derive(Debug)]
pub struct Sandbox {
    name: String,
    cgroup: PathBuf,
    pins: PathBuf,
    files: PathBuf,
}

impl Sandbox {
    /// Makes a sandbox; fails if a requirement is missing.
    pub fn new(name: &str) -> Result<Self> {
        let host =
            requirements().map_err(|missing| anyhow!("requirements are missing:\n{}", missing.join("\n")))?;
        if name.is_empty() || !name.bytes().all(|it| it.is_ascii_alphanumeric() || it == b'_' || it == b'-') {
            bail!("a sandbox cannot be named {name:?}: use letters, digits, `-` and `_`");
        }
        remove_stale(&host);
        let sandbox = Self::of(&host, format!("{PREFIX}{name}-{}", process::id()))?;
        for folder in [&sandbox.cgroup, &sandbox.pins, &sandbox.files] {
            fs::create_dir(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        Ok(sandbox)
    }

    pub fn or_skip() -> Option<Self> {
        Some(Self::new(&name_or_skip()?).expect("the machine has everything a sandbox needs"))
    }

    fn of(host: &Host, name: String) -> Result<Self> {
        let bpffs = match &host.bpffs {
            Some(path) => path.clone(),
            None => mount_bpffs()?,
        };
        let files = std::env::temp_dir().join(&name);
        Ok(Self { cgroup: host.cgroup2.join(&name), pins: bpffs.join(&name), files, name })
    }

    /// Its name, unique on this machine.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The child cgroup: the value of `--cgroup`.
    pub fn cgroup(&self) -> &Path {
        &self.cgroup
    }

    pub fn root_cgroup(&self) -> &Path {
        self.cgroup.parent().expect("a child cgroup has a parent")
    }

    /// The pin folder: the value of `--pin-dir`.
    pub fn pins(&self) -> &Path {
        &self.pins
    }

    pub fn files(&self) -> &Path {
        &self.files
    }

    /// Moves this process with all its threads into the cgroup until the guard is dropped.
    pub fn enter(&self) -> Result<CgroupGuard> {
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let own = own.lines().find_map(|it| it.strip_prefix("0::/")).unwrap_or_default();
        let home = self.root_cgroup().join(own);
        self.add_process(process::id())?;
        Ok(CgroupGuard { home })
    }

    /// Moves this process into the root cgroup until the guard is dropped; sockets made before stay in the sandbox's cgroup.
    pub fn enter_root_cgroup(&self) -> Result<CgroupGuard> {
        move_to(self.root_cgroup(), process::id())?;
        Ok(CgroupGuard { home: self.cgroup.clone() })
    }

    /// Moves another process into the cgroup; it is killed with the sandbox.
    pub fn add_process(&self, process: u32) -> Result<()> {
        move_to(&self.cgroup, process)
    }

    pub fn processes(&self) -> Vec<u32> {
        let members = fs::read_to_string(self.cgroup.join("cgroup.procs")).unwrap_or_default();
        members.lines().filter_map(|it| it.parse().ok()).collect()
    }

    fn remove(&self) -> Result<()> {
        // Processes keep a cgroup, and pins keep programs attached. Cgroups of pods are below.
        let below = fs::read_dir(&self.cgroup).into_iter().flatten().flatten().map(|it| it.path());
        let below: Vec<_> = below.filter(|it| it.is_dir()).collect();
        let mut are_empty: Result<Vec<bool>> = Ok(Vec::new());
        eventually(REMOVAL_TIMEOUT, || {
            are_empty = below.iter().chain([&self.cgroup]).map(|it| empty(it)).collect();
            are_empty.as_ref().is_ok_and(|it| it.iter().all(|it| *it))
        });
        are_empty?;
        for pod in below {
            // If it cannot be removed, neither can the cgroup above, which is reported.
            let _ = fs::remove_dir(pod);
        }
        check_removed(&self.pins, fs::remove_dir_all(&self.pins))?;
        check_removed(&self.files, fs::remove_dir_all(&self.files))?;
        let mut removed: io::Result<()> = Ok(());
        eventually(REMOVAL_TIMEOUT, || {
            removed = fs::remove_dir(&self.cgroup);
            !removed.as_ref().is_err_and(|it| it.kind() == io::ErrorKind::ResourceBusy)
        });
        check_removed(&self.cgroup, removed)
    }
}

pub(crate) fn name_or_skip() -> Option<String> {
    if let Err(missing) = requirements() {
        skip(&missing.join("; "));
        return None;
    }
    Some(current_test().chars().take(MAX_NAME).collect())
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            eprintln!("warning: the sandbox {} was not removed: {error:#}", self.name);
        }
    }
}

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

/// Removes the sandboxes whose owner has ended, and returns their names.
pub fn remove_stale(host: &Host) -> Vec<String> {
    let mut removed = Vec::new();
    for entry in fs::read_dir(&host.cgroup2).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let owner = name.strip_prefix(PREFIX).and_then(|it| it.rsplit('-').next()?.parse::<u32>().ok());
        let Some(owner) = owner else { continue };
        if Path::new("/proc").join(owner.to_string()).exists() {
            continue;
        }
        if let Ok(sandbox) = Sandbox::of(host, name.clone()) {
            // This removes it.
            drop(sandbox);
            removed.push(name);
        }
    }
    removed
}

/// Mounts it once, whatever other tests do meanwhile: a second mount would hide the pins below the first one.
fn mount_bpffs() -> Result<PathBuf> {
    let path = std::env::temp_dir().join("kpe-mount.lock");
    let lock = fs::File::create(&path).and_then(|it| it.lock().map(|()| it));
    let _lock = lock.with_context(|| format!("cannot lock {}", path.display()))?;
    if let Some(mounted) = requirements().ok().and_then(|it| it.bpffs) {
        return Ok(mounted);
    }
    mount(Some("bpf"), BPFFS, Some("bpf"), MsFlags::empty(), None::<&str>)
        .with_context(|| format!("cannot mount a BPF file system: try `mount -t bpf bpf {BPFFS}`"))?;
    Ok(PathBuf::from(BPFFS))
}

pub fn move_to(cgroup: &Path, process: u32) -> Result<()> {
    let file = cgroup.join("cgroup.procs");
    fs::write(&file, process.to_string())
        .with_context(|| format!("cannot write process {process} to {}", file.display()))
}

/// Kills the processes in a cgroup; moves this one to the parent instead. Whether the cgroup was empty.
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

/// The result of the removal of a folder, which may be gone already.
fn check_removed(folder: &Path, result: io::Result<()>) -> Result<()> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}
