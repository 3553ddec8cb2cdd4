//! Keeps a thread on its CPU: the kernel handles what one CPU sends in the order in which it was sent.

use std::io;

use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

/// This thread stays on one CPU until this is dropped.
#[derive(Debug)]
pub(super) struct Pinned(CpuSet);

/// The calling thread.
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
