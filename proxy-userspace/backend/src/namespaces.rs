//! The network namespaces of this machine, as far as they can be seen: those of processes, and those with a name.
//!
//! The one rule: each namespace is entered once, by a thread that ends there.

use std::{
    collections::HashSet,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
};

use nix::{
    errno::Errno,
    sched::{CloneFlags, setns},
};

/// Where namespaces with a name are, by custom; container runtimes keep those of pods there.
const NAMED: &str = "/run/netns";

/// Does something in every other network namespace than the calling thread's; the thread does not come back from the
/// last one. False if none may be entered.
pub(crate) fn in_each_other(mut work: impl FnMut()) -> io::Result<bool> {
    let own = fs::metadata("/proc/thread-self/ns/net")?;
    let mut seen = HashSet::from([(own.dev(), own.ino())]);
    for path in paths()? {
        // What ended meanwhile is nowhere any more, and what may not be looked at may not be entered.
        let Ok(at) = fs::metadata(&path) else { continue };
        if !seen.insert((at.dev(), at.ino())) {
            continue;
        }
        let Ok(file) = File::open(&path) else { continue };
        match setns(file, CloneFlags::CLONE_NEWNET) {
            Ok(()) => work(),
            Err(Errno::EPERM) => return Ok(false),
            // A name without a namespace behind it.
            Err(Errno::EINVAL) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(true)
}

fn paths() -> io::Result<Vec<PathBuf>> {
    let is_process = |name: &std::ffi::OsStr| name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
    let processes = fs::read_dir("/proc")?.flatten().filter(|it| is_process(&it.file_name()));
    let named = fs::read_dir(NAMED).into_iter().flatten().flatten();
    Ok(processes.map(|it| it.path().join("ns/net")).chain(named.map(|it| it.path())).collect())
}
