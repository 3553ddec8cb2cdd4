//! A cgroup for this process, whose sockets a backend translates.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process,
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
