//! Where links, maps and programs are pinned, so that they outlive the process.
//!
//! ```text
//! PIN_DIR/links/connect4 …              links, of all versions: they are updated, never recreated
//! PIN_DIR/sock_nat4/{slots,overflow,…}  NAT entries of sockets; SOCK_NAT_VERSION
//! PIN_DIR/affinity2/{affinity,…}        session affinity; AFFINITY_VERSION
//! PIN_DIR/counters2/{chunks,chunk0,…}   counters; COUNTERS_VERSION
//! PIN_DIR/health2/{failures,health}     which endpoints fail for which clients; HEALTH_VERSION
//! PIN_DIR/v12/{active,frontends4,…}      active-side word and outer maps; LAYOUT_VERSION
//! PIN_DIR/v12/side0/frontends4 …         inner maps
//! PIN_DIR/v12/programs/connect4 …        programs
//! ```
//!
//! Invariant: a pin is never missing while it is replaced: the new one is pinned beside it and renamed over it.

use std::{
    fs::{self, File, TryLockError},
    io::{self, ErrorKind},
    os::{fd::OwnedFd, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use nix::{
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
    unistd::geteuid,
};
use proxy_common::{AFFINITY_VERSION, COUNTERS_VERSION, HEALTH_VERSION, LAYOUT_VERSION, SOCK_NAT_VERSION};

use crate::{
    error::Error,
    host::raw_bpf,
    tables::store::{Side, Table},
};

/// The usual mount point of the bpf file system, where it is mounted if it is not.
const BPFFS: &str = "/sys/fs/bpf";

/// How often and at which interval the lock is tried; a process that holds it longer is another instance.
const MAX_LOCK_ATTEMPTS: u32 = 10;
const LOCK_INTERVAL: Duration = Duration::from_millis(20);

/// The names of folders that end with a version. `sock_nat` was `sockets` before.
const VERSIONED: [&str; 6] = ["v", "sock_nat", "sockets", "affinity", "counters", "health"];

/// The folder of all pins.
#[derive(Clone, Debug)]
pub(crate) struct Pins {
    pub(crate) dir: PathBuf,
    /// The folder of the tables of a version.
    layout: String,
}

impl Pins {
    pub(crate) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_path_buf(), layout: format!("v{LAYOUT_VERSION}") }
    }

    /// The pins of another version's tables, see [`Pins::other_layouts`].
    pub(crate) fn of_layout(&self, layout: String) -> Self {
        Self { dir: self.dir.clone(), layout }
    }

    /// Creates the folders, mounting a bpf file system at its usual mount point if there is none, and locks them, see
    /// [`Self::lock`].
    pub(crate) fn prepare(&self) -> Result<File, Error> {
        if !self.is_on_bpffs()? {
            match mount(Some("bpf"), BPFFS, Some("bpf"), MsFlags::empty(), None::<&str>) {
                // It requires CAP_SYS_ADMIN, which nothing else needs.
                Err(nix::Error::EPERM | nix::Error::EACCES) => return Err(Error::NotBpffs(self.dir.clone())),
                mounted => mounted.map_err(Error::syscall("mount(bpf)", BPFFS))?,
            }
            tracing::info!(path = BPFFS, "bpf file system mounted");
        }
        let lock = loop {
            create_dir(&self.dir)?;
            // `cleanup` may have removed it before it released the lock.
            if let Some(lock) = self.lock()? {
                break lock;
            }
        };
        self.check_owner()?;
        let folders = [self.links(), self.programs()].into_iter().chain(self.outlasting());
        for folder in folders.chain(Side::BOTH.map(|it| self.side(it))) {
            create_dir(&folder)?;
        }
        Ok(lock)
    }

    /// Locks the folder: no other instance uses the pins while the returned file is open. `None` if the folder was removed
    /// meanwhile.
    pub(crate) fn lock(&self) -> Result<Option<File>, Error> {
        let mut attempts = 1..MAX_LOCK_ATTEMPTS;
        loop {
            match self.try_lock(File::try_lock) {
                // `check` may hold it for a moment.
                Err(Error::Locked(_)) if attempts.next().is_some() => thread::sleep(LOCK_INTERVAL),
                result => return result,
            }
        }
    }

    /// Whether an instance holds the lock.
    pub(crate) fn is_locked(&self) -> Result<bool, Error> {
        match self.try_lock(File::try_lock_shared) {
            Ok(_) => Ok(false),
            Err(Error::Locked(_)) => Ok(true),
            Err(error) => Err(error),
        }
    }

    fn try_lock(&self, lock: fn(&File) -> Result<(), TryLockError>) -> Result<Option<File>, Error> {
        if !is_bpffs(&self.dir)? {
            return Err(Error::NotBpffs(self.dir.clone()));
        }
        let dir = match File::open(&self.dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            dir => dir.map_err(Error::syscall("open", self.dir.display()))?,
        };
        match lock(&dir) {
            Err(TryLockError::WouldBlock) => return Err(Error::Locked(self.dir.clone())),
            result => result.map_err(Error::syscall("flock", self.dir.display()))?,
        }
        // The holder before may have removed the folder, and another one may have been created.
        let locked = dir.metadata().map_err(Error::syscall("fstat", self.dir.display()))?.ino();
        let is_same = fs::metadata(&self.dir).is_ok_and(|it| it.ino() == locked);
        Ok(is_same.then_some(dir))
    }

    /// Fails if another user can remove or replace what is pinned: any user may create folders on a bpf file system.
    fn check_owner(&self) -> Result<(), Error> {
        let owner = fs::metadata(&self.dir).map_err(Error::syscall("stat", self.dir.display()))?.uid();
        if [0, geteuid().as_raw()].contains(&owner) {
            return Ok(());
        }
        Err(Error::ForeignPinDir { path: self.dir.clone(), owner })
    }

    pub(crate) fn links(&self) -> PathBuf {
        self.dir.join("links")
    }

    /// Every pin in the folder of links.
    pub(crate) fn all_links(&self) -> Result<Vec<PathBuf>, Error> {
        read_dir(&self.links())
    }

    /// The folder of the outer maps, and of what goes with them.
    pub(crate) fn layout(&self) -> PathBuf {
        self.dir.join(&self.layout)
    }

    /// The folders of what outlasts an upgrade to another layout.
    fn outlasting(&self) -> [PathBuf; 4] {
        [self.sock_nat(), self.affinity(), self.counters(), self.health()]
    }

    fn sock_nat(&self) -> PathBuf {
        self.dir.join(format!("sock_nat{SOCK_NAT_VERSION}"))
    }

    pub(crate) fn affinity(&self) -> PathBuf {
        self.dir.join(format!("affinity{AFFINITY_VERSION}"))
    }

    fn counters(&self) -> PathBuf {
        self.dir.join(format!("counters{COUNTERS_VERSION}"))
    }

    pub(crate) fn health(&self) -> PathBuf {
        self.dir.join(format!("health{HEALTH_VERSION}"))
    }

    /// The outer map of the chunks of counters.
    pub(crate) fn chunks(&self) -> PathBuf {
        self.counters().join("chunks")
    }

    pub(crate) fn chunk(&self, number: u32) -> PathBuf {
        self.counters().join(format!("chunk{number}"))
    }

    /// A map with NAT entries of sockets.
    pub(crate) fn sock_nat_map(&self, name: &str) -> PathBuf {
        self.sock_nat().join(name)
    }

    pub(crate) fn programs(&self) -> PathBuf {
        self.layout().join("programs")
    }

    /// The map with the active-side word.
    pub(crate) fn active(&self) -> PathBuf {
        self.layout().join("active")
    }

    /// The outer map of a table.
    pub(crate) fn outer(&self, table: Table) -> PathBuf {
        self.layout().join(table.name())
    }

    /// A side's map of a table.
    pub(crate) fn inner(&self, side: Side, table: Table) -> PathBuf {
        self.side(side).join(table.name())
    }

    fn side(&self, side: Side) -> PathBuf {
        self.layout().join(format!("side{side}"))
    }

    /// Whether the folder is, or would be created, on a bpf file system; if not, one can be mounted there.
    ///
    /// # Errors
    ///
    /// If nothing can be pinned there, even with a mount.
    pub(crate) fn is_on_bpffs(&self) -> Result<bool, Error> {
        if self.dir.components().any(|it| it.as_os_str().as_encoded_bytes().contains(&b'.')) {
            return Err(Error::DottedPinDir(self.dir.clone()));
        }
        if is_bpffs(&self.dir)? {
            return Ok(true);
        }
        if self.dir.starts_with(BPFFS) { Ok(false) } else { Err(Error::NotBpffs(self.dir.clone())) }
    }

    /// Whether the folder exists; an error if that cannot be determined.
    pub(crate) fn exists(&self) -> Result<bool, Error> {
        self.dir.try_exists().map_err(Error::syscall("stat", self.dir.display()))
    }

    /// Whether the folder is empty or does not exist.
    pub(crate) fn is_empty(&self) -> bool {
        read_dir(&self.dir).is_ok_and(|it| it.is_empty())
    }

    /// Removes what this program pins, of all versions, and returns the other entries, which are kept.
    ///
    /// # Errors
    ///
    /// If something cannot be removed.
    pub(crate) fn remove_all(&self) -> Result<Vec<PathBuf>, Error> {
        for folder in self.versioned()? {
            remove_tree(&folder)?;
        }
        remove_empty(&self.links())?;
        remove_empty(&self.dir)?;
        let mut left = read_dir(&self.dir)?;
        left.retain(|it| *it != self.links());
        left.extend(self.all_links()?);
        Ok(left)
    }

    /// Removes the folders of other versions. Must be called only when no link refers to their programs any more.
    pub(crate) fn remove_other_layouts(&self) -> Result<(), Error> {
        let mut others = self.versioned()?;
        others.retain(|it| *it != self.layout() && !self.outlasting().contains(it));
        for folder in &others {
            remove_tree(folder)?;
            tracing::info!(version = file_name(folder), "unused maps of another version removed");
        }
        Ok(())
    }

    /// The folders of all versions.
    fn versioned(&self) -> Result<Vec<PathBuf>, Error> {
        let mut folders = read_dir(&self.dir)?;
        folders.retain(|folder| {
            let name = file_name(folder);
            VERSIONED.into_iter().any(|it| is_versioned(&name, it))
        });
        Ok(folders)
    }

    /// The names of the folders with tables of other versions.
    pub(crate) fn other_layouts(&self) -> Result<Vec<String>, Error> {
        let names = read_dir(&self.dir)?.into_iter().filter(|it| *it != self.layout());
        Ok(names.map(|it| file_name(&it)).filter(|it| is_versioned(it, "v")).collect())
    }
}

fn is_versioned(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|it| it.parse::<u32>().is_ok())
}

/// Opens what is pinned: a map, a program or a link; `None` if there is nothing.
pub(crate) fn open(path: &Path) -> Result<Option<OwnedFd>, Error> {
    match raw_bpf::obj_get(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some).map_err(Error::syscall("BPF_OBJ_GET", path.display())),
    }
}

/// Where something is pinned before it is renamed to `path`.
pub(crate) fn staging_path(path: &Path) -> PathBuf {
    let mut staging = path.as_os_str().to_owned();
    staging.push("_new");
    PathBuf::from(staging)
}

/// Pins something by `pin` beside `path`, and renames it to `path`.
pub(crate) fn replace(path: &Path, pin: impl FnOnce(&Path) -> Result<(), Error>) -> Result<(), Error> {
    let staging = staging_path(path);
    // A process may have died between the two steps.
    remove_pin(&staging)?;
    pin(&staging)?;
    fs::rename(&staging, path).map_err(Error::syscall("rename", path.display()))
}

/// Removes a folder and its contents, if it exists.
fn remove_tree(path: &Path) -> Result<(), Error> {
    unless_missing(fs::remove_dir_all(path), "rmdir", path)
}

/// Removes a folder if it exists and is empty.
fn remove_empty(path: &Path) -> Result<(), Error> {
    match fs::remove_dir(path) {
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
        result => unless_missing(result, "rmdir", path),
    }
}

/// Removes a pin, if it exists.
pub(crate) fn remove_pin(path: &Path) -> Result<(), Error> {
    unless_missing(fs::remove_file(path), "unlink", path)
}

fn unless_missing(result: io::Result<()>, call: &'static str, path: &Path) -> Result<(), Error> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result.map_err(Error::syscall(call, path.display())),
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn read_dir(path: &Path) -> Result<Vec<PathBuf>, Error> {
    let failed = || Error::syscall("readdir", path.display());
    let entries = match fs::read_dir(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed())?,
    };
    let mut paths =
        entries.map(|it| it.map(|it| it.path())).collect::<io::Result<Vec<_>>>().map_err(failed())?;
    paths.sort_unstable();
    Ok(paths)
}

fn create_dir(path: &Path) -> Result<(), Error> {
    fs::create_dir_all(path).map_err(Error::syscall("mkdir", path.display()))
}

/// Whether a path is, or would be created, on a bpf file system.
fn is_bpffs(path: &Path) -> Result<bool, Error> {
    // The first ancestor that exists and is accessible; one call each, because any of them may be removed at any moment.
    let nearest = path.ancestors().find_map(|it| statfs(it).ok());
    let stat = nearest.map_or_else(|| statfs("/"), Ok).map_err(Error::syscall("statfs", path.display()))?;
    Ok(stat.filesystem_type() == BPF_FS_MAGIC)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_pins(name: &str) -> Option<Pins> {
        let dir = Path::new(BPFFS).join(format!("kube-proxy-ebpf-{name}-{}", std::process::id()));
        if !geteuid().is_root() || !is_bpffs(&dir).is_ok_and(|it| it) {
            eprintln!("skipped: no folder can be created on a bpf file system at {BPFFS}");
            return None;
        }
        Some(Pins::new(&dir))
    }

    #[test]
    fn a_folder_that_is_removed_while_its_lock_is_awaited_is_created_again() {
        let Some(pins) = test_pins("lock") else { return };
        for _ in 0..20 {
            create_dir(&pins.dir).unwrap();
            let held = pins.lock().unwrap().unwrap();
            assert!(pins.is_locked().unwrap());
            let waiting = thread::spawn({
                let pins = pins.clone();
                move || pins.prepare()
            });
            // As `cleanup` does, usually while the thread waits.
            thread::sleep(Duration::from_millis(5));
            remove_tree(&pins.dir).unwrap();
            drop(held);
            let taken = waiting.join().unwrap();
            match &taken {
                Ok(_) => assert!(matches!(pins.prepare(), Err(Error::Locked(_))), "only one holds the lock"),
                Err(error) => assert!(matches!(error, Error::Locked(_)), "{error}"),
            }
            remove_tree(&pins.dir).unwrap();
        }
    }

    #[test]
    fn folders_of_other_versions_are_removed_and_nothing_else() {
        let Some(pins) = test_pins("versions") else { return };
        let _lock = pins.prepare().unwrap();
        let current = read_dir(&pins.dir).unwrap();
        let others = ["affinity1", "counters7", "sock_nat9", "sockets1", "v4"];
        for name in others {
            create_dir(&pins.dir.join(name).join("programs")).unwrap();
        }
        create_dir(&pins.dir.join("vault")).unwrap();
        pins.remove_other_layouts().unwrap();
        assert!(others.iter().all(|it| !pins.dir.join(it).exists()));
        assert!(current.iter().all(|it| it.exists()));
        assert_eq!(pins.remove_all().unwrap(), [pins.dir.join("vault")]);
        assert!(current.iter().all(|it| !it.exists()));
        remove_tree(&pins.dir).unwrap();
    }
}
