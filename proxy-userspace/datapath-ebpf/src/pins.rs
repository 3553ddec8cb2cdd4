//! Where everything is pinned, so that it outlives the process.
//!
//! ```text
//! PIN_DIR/links/connect4 …          links, whatever the version: they are updated, never made anew
//! PIN_DIR/sock_nat1/{slots,sk_nat,…}     what sockets remember; the version of proxy_common::socket
//! PIN_DIR/affinity2/{affinity,…}        which client was given which backend; the version of proxy_common::affinity
//! PIN_DIR/counters1/{chunks,chunk0,…}   what is counted; the version of proxy_common::counters
//! PIN_DIR/v5/{active,frontends4,…}  the side word and the outer maps; the version of proxy_common::tables
//! PIN_DIR/v5/side0/frontends4 …     the inner maps
//! PIN_DIR/v5/programs/connect4 …    the programs
//! ```
//!
//! The one rule: a pin is never missing while it is replaced: the new one is pinned beside it and renamed over it.

use std::{
    fs::{self, File},
    io::{self, ErrorKind},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use nix::{
    fcntl::{Flock, FlockArg},
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
    unistd::geteuid,
};
use proxy_common::{AFFINITY_VERSION, COUNTERS_VERSION, LAYOUT_VERSION, SOCK_NAT_VERSION};

use crate::{
    error::Error,
    store::{Side, Table},
};

/// Where the bpf file system usually is, and where we mount it if it is not.
const BPFFS: &str = "/sys/fs/bpf";

/// How often, and after which pause, the lock is tried for: whoever has it for long works there.
const LOCK_TRIES: u32 = 10;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// The folders whose names end with a layout version. Before `sock_nat` there was `sockets`.
const VERSIONED: [&str; 5] = ["v", "sock_nat", "sockets", "affinity", "counters"];

/// The folder of all pins.
#[derive(Clone, Debug)]
pub(super) struct Pins {
    dir: PathBuf,
}

/// Nobody else works on the pins while this is alive.
#[derive(Debug)]
pub(super) struct PinLock {
    _lock: Flock<File>,
}

impl Pins {
    /// The pins below `dir`.
    pub(super) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_path_buf() }
    }

    /// The folder itself.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Makes the folders, mounting a bpf file system at its usual place if there is none, and keeps others out.
    pub(super) fn prepare(&self) -> Result<PinLock, Error> {
        if !self.place()? {
            match mount(Some("bpf"), BPFFS, Some("bpf"), MsFlags::empty(), None::<&str>) {
                // It would take CAP_SYS_ADMIN, which nothing else needs.
                Err(nix::Error::EPERM | nix::Error::EACCES) => return Err(Error::NotBpffs(self.dir.clone())),
                mounted => mounted.map_err(Error::errno("mount(bpf)", BPFFS))?,
            }
            tracing::info!("mounted a bpf file system at {BPFFS}");
        }
        let lock = loop {
            create_dir(&self.dir)?;
            // `cleanup` may have removed it before it let go of it.
            if let Some(lock) = self.lock()? {
                break lock;
            }
        };
        self.check_owner()?;
        create_dir(&self.links())?;
        create_dir(&self.sock_nat())?;
        create_dir(&self.affinity())?;
        create_dir(&self.counters())?;
        create_dir(&self.programs())?;
        for side in Side::BOTH {
            create_dir(&self.side(side))?;
        }
        Ok(lock)
    }

    /// Keeps others out of the folder; nothing if it is not there any more.
    pub(super) fn lock(&self) -> Result<Option<PinLock>, Error> {
        let mut tries = 1..LOCK_TRIES;
        loop {
            match self.try_lock(FlockArg::LockExclusiveNonblock) {
                // `check` may be looking whether somebody holds it.
                Err(Error::Locked(_)) if tries.next().is_some() => thread::sleep(LOCK_PAUSE),
                result => return result,
            }
        }
    }

    /// Whether somebody keeps others out of the folder.
    pub(super) fn is_locked(&self) -> Result<bool, Error> {
        match self.try_lock(FlockArg::LockSharedNonblock) {
            Ok(_) => Ok(false),
            Err(Error::Locked(_)) => Ok(true),
            Err(error) => Err(error),
        }
    }

    fn try_lock(&self, how: FlockArg) -> Result<Option<PinLock>, Error> {
        if !is_bpffs(&self.dir)? {
            return Err(Error::NotBpffs(self.dir.clone()));
        }
        let dir = match File::open(&self.dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            dir => dir.map_err(Error::syscall("open", self.dir.display()))?,
        };
        match Flock::lock(dir, how) {
            // Whoever held it may have removed it, and another may have taken its place.
            Ok(lock) => {
                let locked = lock.metadata().map_err(Error::syscall("fstat", self.dir.display()))?.ino();
                let is_there = fs::metadata(&self.dir).is_ok_and(|it| it.ino() == locked);
                Ok(is_there.then_some(PinLock { _lock: lock }))
            }
            Err((_, nix::Error::EWOULDBLOCK)) => Err(Error::Locked(self.dir.clone())),
            Err((_, errno)) => Err(Error::errno("flock", self.dir.display())(errno)),
        }
    }

    /// Sees to it that nobody else may remove what is pinned, or pin something in its place: anybody may make folders on
    /// a bpf file system.
    fn check_owner(&self) -> Result<(), Error> {
        let there = fs::metadata(&self.dir).map_err(Error::syscall("stat", self.dir.display()))?;
        if [0, geteuid().as_raw()].contains(&there.uid()) {
            return Ok(());
        }
        Err(Error::ForeignPinDir { path: self.dir.clone(), owner: there.uid() })
    }

    /// The folder of links.
    pub(super) fn links(&self) -> PathBuf {
        self.dir.join("links")
    }

    /// Everything in the folder of links.
    pub(super) fn all_links(&self) -> Result<Vec<PathBuf>, Error> {
        read_dir(&self.links())
    }

    /// The folder of this version's tables.
    pub(super) fn layout(&self) -> PathBuf {
        self.dir.join(format!("v{LAYOUT_VERSION}"))
    }

    /// The folder of what sockets remember.
    pub(super) fn sock_nat(&self) -> PathBuf {
        self.dir.join(format!("sock_nat{SOCK_NAT_VERSION}"))
    }

    /// The folder of which client was given which backend.
    pub(super) fn affinity(&self) -> PathBuf {
        self.dir.join(format!("affinity{AFFINITY_VERSION}"))
    }

    /// The folder of what is counted.
    pub(super) fn counters(&self) -> PathBuf {
        self.dir.join(format!("counters{COUNTERS_VERSION}"))
    }

    /// The map that programs find the chunks of counters in.
    pub(super) fn chunks(&self) -> PathBuf {
        self.counters().join("chunks")
    }

    /// A chunk of counters.
    pub(super) fn chunk(&self, number: u32) -> PathBuf {
        self.counters().join(format!("chunk{number}"))
    }

    /// A map of what sockets remember.
    pub(super) fn sock_nat_map(&self, name: &str) -> PathBuf {
        self.sock_nat().join(name)
    }

    /// The folder of this version's programs.
    pub(super) fn programs(&self) -> PathBuf {
        self.layout().join("programs")
    }

    /// The side word.
    pub(super) fn active(&self) -> PathBuf {
        self.layout().join("active")
    }

    /// The map that says where the frontends of both sides may be.
    pub(super) fn prefilters(&self) -> PathBuf {
        self.layout().join("prefilter")
    }

    /// The outer map of a table.
    pub(super) fn outer(&self, table: Table) -> PathBuf {
        self.layout().join(table.name())
    }

    /// A side's map of a table.
    pub(super) fn inner(&self, side: Side, table: Table) -> PathBuf {
        self.side(side).join(table.name())
    }

    fn side(&self, side: Side) -> PathBuf {
        self.layout().join(format!("side{side}"))
    }

    /// Whether the folder lies, or would lie, on a bpf file system; if not, one can be mounted where it would.
    ///
    /// # Errors
    ///
    /// If nothing can be pinned there, now or then.
    pub(super) fn place(&self) -> Result<bool, Error> {
        if self.dir.components().any(|it| it.as_os_str().as_encoded_bytes().contains(&b'.')) {
            return Err(Error::DottedPinDir(self.dir.clone()));
        }
        if is_bpffs(&self.dir)? {
            return Ok(true);
        }
        if self.dir.starts_with(BPFFS) { Ok(false) } else { Err(Error::NotBpffs(self.dir.clone())) }
    }

    /// Whether there is anything at all. What cannot be looked at is an error, and no "no".
    pub(super) fn is_present(&self) -> Result<bool, Error> {
        self.dir.try_exists().map_err(Error::syscall("stat", self.dir.display()))
    }

    /// Whether nothing is in the folder, or it is not there.
    pub(super) fn is_empty(&self) -> bool {
        read_dir(&self.dir).is_ok_and(|it| it.is_empty())
    }

    /// Removes what this program pins, of any version, and returns what was found beside it and left alone.
    ///
    /// # Errors
    ///
    /// If the folder is not on a bpf file system, nothing is removed: nothing of ours can be there.
    pub(super) fn remove_all(&self) -> Result<Vec<PathBuf>, Error> {
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

    /// Removes the folders of other versions. To be called when no link refers to their programs any more.
    pub(super) fn remove_other_layouts(&self) -> Result<Vec<String>, Error> {
        let current = [self.layout(), self.sock_nat(), self.affinity(), self.counters()];
        let mut others = self.versioned()?;
        others.retain(|it| !current.contains(it));
        for folder in &others {
            remove_tree(folder)?;
        }
        Ok(others.iter().map(|it| file_name(it)).collect())
    }

    /// The folders of any version.
    fn versioned(&self) -> Result<Vec<PathBuf>, Error> {
        let mut folders = read_dir(&self.dir)?;
        folders.retain(|folder| {
            let name = file_name(folder);
            let has_version =
                |prefix| name.strip_prefix(prefix).is_some_and(|it: &str| it.parse::<u32>().is_ok());
            VERSIONED.into_iter().any(has_version)
        });
        Ok(folders)
    }

    /// The tables of other versions, by the names of their folders.
    pub(super) fn other_layouts(&self) -> Result<Vec<String>, Error> {
        let names = read_dir(&self.dir)?.into_iter().filter(|it| *it != self.layout());
        Ok(names
            .map(|it| file_name(&it))
            .filter(|it| it.strip_prefix('v').is_some_and(|it| it.parse::<u32>().is_ok()))
            .collect())
    }
}

/// Where something is pinned before it takes its place.
pub(super) fn beside(path: &Path) -> PathBuf {
    let mut beside = path.as_os_str().to_owned();
    beside.push("_new");
    PathBuf::from(beside)
}

/// Pins something by `pin` beside `path`, and then has it take its place.
pub(super) fn replace(path: &Path, pin: impl FnOnce(&Path) -> Result<(), Error>) -> Result<(), Error> {
    let beside = beside(path);
    // Somebody may have died between the two steps.
    remove_pin(&beside)?;
    pin(&beside)?;
    fs::rename(&beside, path).map_err(Error::syscall("rename", path.display()))
}

/// Removes a folder with all that is in it, and says what it cannot remove.
pub(super) fn remove_tree(path: &Path) -> Result<(), Error> {
    for entry in read_dir(path)? {
        if entry.is_dir() {
            remove_tree(&entry)?;
        } else {
            remove_pin(&entry)?;
        }
    }
    match fs::remove_dir(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Error::syscall("rmdir", path.display())(error))
        }
        _ => Ok(()),
    }
}

/// Removes a folder if nothing is in it.
fn remove_empty(path: &Path) -> Result<(), Error> {
    match fs::remove_dir(path) {
        Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) => {
            Err(Error::syscall("rmdir", path.display())(error))
        }
        _ => Ok(()),
    }
}

/// Removes one pin, if it is there.
pub(super) fn remove_pin(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Error::syscall("unlink", path.display())(error))
        }
        _ => Ok(()),
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

/// Whether a path lies, or would lie, on a bpf file system.
fn is_bpffs(path: &Path) -> Result<bool, Error> {
    // Past what is not there, or lies where one may not look. Each is asked once: somebody may remove it at any moment.
    let there = path.ancestors().find_map(|it| statfs(it).ok());
    let stat = there.map_or_else(|| statfs("/"), Ok).map_err(Error::errno("statfs", path.display()))?;
    Ok(stat.filesystem_type() == BPF_FS_MAGIC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_was_removed_while_it_was_waited_for_is_made_anew() {
        let pins = Pins::new(&Path::new(BPFFS).join(format!("kube-proxy-ebpf-test-{}", std::process::id())));
        if !geteuid().is_root() || !is_bpffs(&pins.dir).is_ok_and(|it| it) {
            eprintln!("skipped: no folder can be made on a bpf file system at {BPFFS}");
            return;
        }
        for _ in 0..20 {
            create_dir(&pins.dir).unwrap();
            let held = pins.lock().unwrap().unwrap();
            assert!(pins.is_locked().unwrap());
            let waits = thread::spawn({
                let pins = pins.clone();
                move || pins.prepare()
            });
            // As `cleanup` does it, while the other one waits, if all goes well.
            thread::sleep(Duration::from_millis(5));
            remove_tree(&pins.dir).unwrap();
            drop(held);
            let taken = waits.join().unwrap();
            match &taken {
                Ok(_) => assert!(matches!(pins.prepare(), Err(Error::Locked(_))), "it is held by one alone"),
                Err(error) => assert!(matches!(error, Error::Locked(_)), "{error}"),
            }
            remove_tree(&pins.dir).unwrap();
        }
    }

    #[test]
    fn folders_of_other_versions_are_removed_and_nothing_else() {
        let pins =
            Pins::new(&Path::new(BPFFS).join(format!("kube-proxy-ebpf-versions-{}", std::process::id())));
        if !geteuid().is_root() || !is_bpffs(&pins.dir).is_ok_and(|it| it) {
            eprintln!("skipped: no folder can be made on a bpf file system at {BPFFS}");
            return;
        }
        let _lock = pins.prepare().unwrap();
        let current = read_dir(&pins.dir).unwrap();
        let others = ["affinity1", "counters7", "sock_nat9", "sockets1", "v4"];
        for name in others {
            create_dir(&pins.dir.join(name).join("programs")).unwrap();
        }
        create_dir(&pins.dir.join("vault")).unwrap();
        assert_eq!(pins.remove_other_layouts().unwrap(), others);
        assert_eq!(pins.remove_all().unwrap(), [pins.dir.join("vault")]);
        assert!(current.iter().all(|it| !it.exists()));
        remove_tree(&pins.dir).unwrap();
    }
}
