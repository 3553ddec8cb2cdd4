//! The network namespaces of this machine: those of visible processes, and named ones.
//!
//! Invariant: each namespace is entered once, by a thread that ends there.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{self, ErrorKind},
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
    thread,
};

use nix::{
    errno::Errno,
    sched::{CloneFlags, setns},
};

/// Where named namespaces are, by convention (ip-netns(8)); container runtimes keep those of pods there.
const NAMED_DIR: &str = "/run/netns";

/// The inode of the initial pid namespace (`PROC_PID_INIT_INO` in the kernel).
const INIT_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Whether /proc shows every process of the machine, rather than those of a container.
pub fn sees_all_processes() -> bool {
    fs::metadata("/proc/self/ns/pid").is_ok_and(|it| it.ino() == INIT_PID_NAMESPACE)
}

/// Does something in every network namespace but the calling thread's own. False if there may be namespaces that are not
/// visible or may not be entered.
pub fn for_each_other(work: impl FnMut() + Send) -> io::Result<bool> {
    // In a thread of its own, because one that has entered another namespace cannot be used for anything else.
    thread::scope(|it| it.spawn(|| enter_each_other(work)).join())
        .unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
}

/// Does it in the calling thread, which stays in the last namespace.
fn enter_each_other(mut work: impl FnMut()) -> io::Result<bool> {
    let own = fs::metadata("/proc/thread-self/ns/net")?;
    let mut seen = HashSet::from([(own.dev(), own.ino())]);
    let mut are_all_visible = sees_all_processes();
    for path in paths()? {
        let opened = fs::metadata(&path).and_then(|at| {
            let is_new = seen.insert((at.dev(), at.ino()));
            is_new.then(|| File::open(&path)).transpose()
        });
        let file = match opened {
            Ok(Some(file)) => file,
            Ok(None) => continue,
            // A process may have ended meanwhile; one that may not be inspected (ptrace(2)) still has a namespace.
            Err(error) => {
                are_all_visible &= error.kind() != ErrorKind::PermissionDenied;
                continue;
            }
        };
        match setns(file, CloneFlags::CLONE_NEWNET) {
            Ok(()) => work(),
            Err(Errno::EPERM) => return Ok(false),
            // A stale name.
            Err(Errno::EINVAL) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(are_all_visible)
}

fn paths() -> io::Result<Vec<PathBuf>> {
    let is_process = |name: &std::ffi::OsStr| name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
    let processes = fs::read_dir("/proc")?.flatten().filter(|it| is_process(&it.file_name()));
    let named = fs::read_dir(NAMED_DIR).into_iter().flatten().flatten();
    Ok(processes.map(|it| it.path().join("ns/net")).chain(named.map(|it| it.path())).collect())
}
