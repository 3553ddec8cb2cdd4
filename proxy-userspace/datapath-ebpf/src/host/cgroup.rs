//! The cgroup whose sockets are translated, and whose processes are in it.
//!
//! Without an explicit path the cgroup that covers the most processes is used; if it does not cover all pods, that is reported.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File},
    io::ErrorKind,
    iter,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

use crate::error::Error;

/// What [`Reach::Nested`] means, and its remedy.
pub(crate) const NESTED: &str = "is a nested cgroup without pods below it: sockets outside are not served";
pub(crate) const NESTED_REMEDY: &str =
    "mount the host's /sys/fs/cgroup into this container, or give the right one with --cgroup";

/// A cgroup to attach to.
#[derive(Debug)]
pub(crate) struct Cgroup {
    pub(crate) path: PathBuf,
    pub(crate) dir: File,
    /// Its id in the kernel (the inode number).
    pub(crate) id: u64,
    is_explicit: bool,
}

/// Which processes are below a cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Every process of the machine.
    Machine,
    /// Those of a machine that is a container itself, including kubelet's pods, which are in this folder.
    Pods(&'static str),
    /// Those below a cgroup that was given explicitly.
    Explicit,
    /// Those of one container, although no cgroup was given.
    Nested,
}

impl Cgroup {
    /// Opens a cgroup; without a path the root of a cgroup2 mount, preferably the machine's root.
    pub(crate) fn open(path: Option<&Path>) -> Result<Self, Error> {
        match path {
            Some(path) => Self::at(path.to_path_buf(), true),
            None => Self::at(find_cgroup2()?, false),
        }
    }

    fn at(path: PathBuf, is_explicit: bool) -> Result<Self, Error> {
        let failed = |call| Error::syscall(call, path.display());
        let dir = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(Error::NoCgroup(path)),
            opened => opened.map_err(failed("open"))?,
        };
        let stat = statfs(&path).map_err(Error::syscall("statfs", path.display()))?;
        if stat.filesystem_type() != CGROUP2_SUPER_MAGIC {
            return Err(Error::NotCgroup2(path));
        }
        let id = dir.metadata().map_err(failed("stat"))?.ino();
        Ok(Self { path, dir, id, is_explicit })
    }

    /// Whether this process is in it or below; false if that is unknown.
    pub(crate) fn has_own_process(&self) -> bool {
        if is_machines_root(&self.path) {
            return true;
        }
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let own = own.lines().find_map(|it| it.strip_prefix("0::/"));
        // The path is relative to the root that this process sees, which may differ from what is mounted here.
        let here = own.and_then(|own| fs::canonicalize(mount_of(&self.path).join(own)).ok());
        let is_own = |it: &Path| fs::metadata(it).is_ok_and(|it| it.ino() == self.id);
        here.is_some_and(|it| it.ancestors().take_while(|it| is_cgroup2(it)).any(is_own))
    }

    pub(crate) fn reach(&self) -> Reach {
        reach(&self.path, self.is_explicit)
    }

    /// The cgroup at its path now, if that is another one.
    pub(crate) fn successor(&self) -> Result<Option<Self>, Error> {
        let now = Self::at(self.path.clone(), self.is_explicit)?;
        Ok((now.id != self.id).then_some(now))
    }
}

/// The paths of cgroups with these ids, relative to `root`, if they still exist. Control characters are escaped.
pub(crate) fn paths_of(root: &Path, ids: impl Iterator<Item = u64>) -> HashMap<u64, String> {
    let mut missing: HashSet<u64> = ids.collect();
    let mut found = HashMap::new();
    for folder in folders(root) {
        if missing.is_empty() {
            break;
        }
        if let Ok(metadata) = fs::metadata(&folder)
            && missing.remove(&metadata.ino())
        {
            let path = folder.strip_prefix(root).unwrap_or(&folder).display().to_string();
            found.insert(metadata.ino(), format!("/{}", path.escape_debug()));
        }
    }
    found
}

/// A folder and all folders below it, as far as they can be read.
pub(crate) fn folders(root: &Path) -> impl Iterator<Item = PathBuf> {
    let mut unread = vec![root.to_path_buf()];
    iter::from_fn(move || {
        let folder = unread.pop()?;
        unread.extend(folders_in(&folder));
        Some(folder)
    })
}

/// The folders in a folder, none if it cannot be read.
pub(crate) fn folders_in(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter(|it| it.file_type().is_ok_and(|it| it.is_dir())).map(|it| it.path())
}

/// The topmost folder of the mount that a cgroup is on.
pub(crate) fn mount_of(path: &Path) -> &Path {
    path.ancestors().take_while(|it| is_cgroup2(it)).last().unwrap_or(path)
}

/// Whether a folder is a cgroup below another one: not the topmost of its mount. (In a machine that is a container the
/// topmost one has a parent, too, which cannot be seen.)
pub fn is_nested_cgroup(path: &Path) -> bool {
    fs::canonicalize(path).is_ok_and(|it| mount_of(&it) != it)
}

pub(crate) fn is_cgroup2(path: &Path) -> bool {
    statfs(path).is_ok_and(|it| it.filesystem_type() == CGROUP2_SUPER_MAGIC)
}

/// Whether a cgroup is the root of the machine: every other one has a type (cgroups(7)).
fn is_machines_root(path: &Path) -> bool {
    !path.join("cgroup.type").exists()
}

fn reach(path: &Path, is_explicit: bool) -> Reach {
    if is_machines_root(path) {
        return Reach::Machine;
    }
    match pods_below(path) {
        Some(pods) => Reach::Pods(pods),
        None if is_explicit => Reach::Explicit,
        None => Reach::Nested,
    }
}

/// The folder of kubelet's pods below a cgroup.
fn pods_below(path: &Path) -> Option<&'static str> {
    // kubelet's two cgroup drivers, and the level that kind and minikube put above.
    ["kubepods.slice", "kubepods", "kubelet.slice/kubelet-kubepods.slice", "kubelet/kubepods"]
        .into_iter()
        .find(|it| path.join(it).is_dir())
}

/// The root of a cgroup2 mount.
///
/// # Errors
///
/// If there is none.
pub fn find_cgroup2() -> Result<PathBuf, Error> {
    const MOUNTS: &str = "/proc/self/mountinfo";
    let mounts = fs::read_to_string(MOUNTS).map_err(Error::syscall("read", MOUNTS))?;
    choose(&mounts, is_machines_root).ok_or_else(|| Error::NotCgroup2(PathBuf::from("/sys/fs/cgroup")))
}

/// The first cgroup2 mount that shows the machine's root, otherwise the first one; a container may have the host's mount
/// beside its own.
fn choose(mounts: &str, is_machines_root: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    // The mount point is the fifth field; the type follows a single dash (proc_pid_mountinfo(5)).
    let found = mounts.lines().filter_map(|line| {
        let (fields, kind) = line.split_once(" - ")?;
        kind.starts_with("cgroup2 ").then(|| fields.split(' ').nth(4)).flatten()
    });
    let found: Vec<_> = found.map(Path::new).collect();
    found.iter().find(|it| is_machines_root(it)).or(found.first()).map(|it| it.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory
31 22 0:27 / /sys/fs/cgroup ro,nosuid master:9 shared:10 - cgroup2 cgroup rw
32 22 0:27 / /host/cgroup rw,nosuid - cgroup2 cgroup2 rw
";

    #[test]
    fn the_machines_root_is_preferred_to_a_containers_own() {
        let at = |root: Option<&str>| choose(MOUNTS, |it| root.is_some_and(|root| it == Path::new(root)));
        assert_eq!(at(Some("/host/cgroup")), Some("/host/cgroup".into()));
        assert_eq!(at(Some("/sys/fs/cgroup")), Some("/sys/fs/cgroup".into()));
        assert_eq!(at(None), Some("/sys/fs/cgroup".into()), "the first one, if none is the machine's");
        assert_eq!(choose("30 22 0:26 / /sys/fs/cgroup rw - cgroup cgroup rw\n", |_| true), None);
    }

    #[test]
    fn a_nested_cgroup_reaches_the_pods_below_it() {
        // A folder can stand for a cgroup: only names are examined.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        assert_eq!(reach(path, false), Reach::Machine);
        fs::write(path.join("cgroup.type"), "domain\n").unwrap();
        assert_eq!(reach(path, false), Reach::Nested);
        assert_eq!(reach(path, true), Reach::Explicit);
        fs::create_dir_all(path.join("kubelet/kubepods")).unwrap();
        assert_eq!(reach(path, false), Reach::Pods("kubelet/kubepods"));
    }
}
