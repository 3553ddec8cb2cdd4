//! The network namespaces of this machine, as far as they can be seen: those of processes, and those with a name.
//!
//! The one rule: each namespace is entered once, by a thread that ends there.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{self, ErrorKind},
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
};

use nix::{
    errno::Errno,
    sched::{CloneFlags, setns},
};

/// Where namespaces with a name are, by custom; container runtimes keep those of pods there.
const NAMED: &str = "/run/netns";

/// The number of the machine's first pid namespace (`PROC_PID_INIT_INO` of the kernel).
const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Whether /proc shows every process of the machine, rather than those of a container.
pub(crate) fn sees_every_process() -> bool {
    fs::metadata("/proc/self/ns/pid").is_ok_and(|it| it.ino() == FIRST_PID_NAMESPACE)
}

/// Does something in every other network namespace than the calling thread's; the thread does not come back from the
/// last one. False if there may be some that it has not seen, or may not enter.
pub(crate) fn in_each_other(mut work: impl FnMut()) -> io::Result<bool> {
    let own = fs::metadata("/proc/thread-self/ns/net")?;
    let mut seen = HashSet::from([(own.dev(), own.ino())]);
    let mut everywhere = sees_every_process();
    for path in paths()? {
        let opened = fs::metadata(&path).and_then(|at| {
            let is_new = seen.insert((at.dev(), at.ino()));
            is_new.then(|| File::open(&path)).transpose()
        });
        let file = match opened {
            Ok(Some(file)) => file,
            Ok(None) => continue,
            // What ended meanwhile is nowhere any more; what may not be looked at (ptrace(2)) is somewhere.
            Err(error) => {
                everywhere &= error.kind() != ErrorKind::PermissionDenied;
                continue;
            }
        };
        match setns(file, CloneFlags::CLONE_NEWNET) {
            Ok(()) => work(),
            Err(Errno::EPERM) => return Ok(false),
            // A name without a namespace behind it.
            Err(Errno::EINVAL) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(everywhere)
}

fn paths() -> io::Result<Vec<PathBuf>> {
    let is_process = |name: &std::ffi::OsStr| name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
    let processes = fs::read_dir("/proc")?.flatten().filter(|it| is_process(&it.file_name()));
    let named = fs::read_dir(NAMED).into_iter().flatten().flatten();
    Ok(processes.map(|it| it.path().join("ns/net")).chain(named.map(|it| it.path())).collect())
}
