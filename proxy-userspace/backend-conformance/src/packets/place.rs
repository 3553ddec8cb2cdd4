//! Where this process asks: in a cgroup, whose sockets a backend translates, and on one CPU.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process,
};

use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

/// Leaves and removes the cgroup when dropped.
#[derive(Debug)]
pub(super) struct Cgroup {
    path: PathBuf,
    /// The previous cgroup of this process.
    home: PathBuf,
}

impl Cgroup {
    /// Makes the cgroup and moves this process there.
    pub(super) fn enter(path: &Path) -> io::Result<Self> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let own = own.lines().find_map(|it| it.strip_prefix("0::/")).unwrap_or_default();
        let home = path.parent().unwrap_or(path).join(own);
        fs::create_dir_all(path).map_err(named)?;
        enter(path).map_err(named)?;
        Ok(Self { path: path.to_owned(), home })
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // It is empty then, but for what the backend left.
        let _ = enter(&self.home).and_then(|()| fs::remove_dir(&self.path));
    }
}

fn enter(cgroup: &Path) -> io::Result<()> {
    fs::write(cgroup.join("cgroup.procs"), process::id().to_string())
}

/// This thread stays on one CPU until this is dropped: the kernel handles what one CPU sends in the order in which it was sent.
#[derive(Debug)]
pub(super) struct Pinned(CpuSet);

const THIS: Pid = Pid::from_raw(0);

impl Pinned {
    pub(super) fn to_this_cpu() -> io::Result<Self> {
        let allowed = sched_getaffinity(THIS)?;
        let first = (0..CpuSet::count()).find(|it| allowed.is_set(*it).unwrap_or_default());
        let mut one = CpuSet::new();
        one.set(first.unwrap_or_default())?;
        sched_setaffinity(THIS, &one)?;
        Ok(Self(allowed))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // It was allowed before.
        let _ = sched_setaffinity(THIS, &self.0);
    }
}
