//! The system calls that change something: BPF objects, netfilter, sockets, files.
//!
//! Calls that only read or wait, and those that concern the process alone, are no steps.

use std::{
    fmt,
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::Path,
};

use nix::{libc, unistd::Pid};
use syscalls::Sysno;

/// The commands of `bpf(2)` that change something (`enum bpf_cmd` of `linux/bpf.h`).
const BPF_COMMANDS: [(u64, &str); 16] = [
    (0, "MAP_CREATE"),
    (2, "MAP_UPDATE_ELEM"),
    (3, "MAP_DELETE_ELEM"),
    (5, "PROG_LOAD"),
    (6, "OBJ_PIN"),
    (8, "PROG_ATTACH"),
    (9, "PROG_DETACH"),
    (10, "PROG_TEST_RUN"),
    (18, "BTF_LOAD"),
    (21, "MAP_LOOKUP_AND_DELETE_ELEM"),
    (22, "MAP_FREEZE"),
    (26, "MAP_UPDATE_BATCH"),
    (27, "MAP_DELETE_BATCH"),
    (28, "LINK_CREATE"),
    (29, "LINK_UPDATE"),
    (34, "LINK_DETACH"),
];

/// A system call that a process is about to make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    /// The thread.
    pub(crate) thread: Pid,
    /// Its number.
    pub(crate) number: u64,
    /// Its first four arguments.
    pub(crate) arguments: [u64; 4],
}

/// A step, as it is printed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Step(String);

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Step {
    /// The step of the name that [`fmt::Display`] has printed.
    pub(crate) fn named(name: &str) -> Self {
        Self(name.to_owned())
    }
}

impl Call {
    /// The step that this call is, if it is one.
    pub(crate) fn step(&self) -> Option<Step> {
        let [first, second, third, _] = self.arguments;
        let name = match Sysno::new(usize::try_from(self.number).ok()?)? {
            Sysno::bpf => {
                let (_, name) = BPF_COMMANDS.into_iter().find(|it| it.0 == first)?;
                format!("bpf {name}")
            }
            call @ (Sysno::mkdir | Sysno::rmdir | Sysno::unlink) => self.on_path(call, first),
            call @ (Sysno::mkdirat | Sysno::unlinkat) => self.on_path(call, second),
            call @ (Sysno::rename | Sysno::link | Sysno::symlink | Sysno::mount) => {
                self.on_path(call, second)
            }
            call @ (Sysno::renameat | Sysno::renameat2 | Sysno::linkat) => {
                self.on_path(call, self.arguments[3])
            }
            call @ Sysno::openat if third & (libc::O_CREAT | libc::O_TRUNC) as u64 != 0 => {
                self.on_path(call, second)
            }
            call @ (Sysno::sendto | Sysno::sendmsg) if self.is_netlink(first) => format!("netlink {call}"),
            call @ (Sysno::write | Sysno::pwrite64 | Sysno::ftruncate) if first > 2 => {
                format!("{call} {}", self.file(first).filter(|it| it.starts_with('/'))?)
            }
            call @ (Sysno::flock | Sysno::fchmod) => {
                format!("{call} {}", self.file(first).unwrap_or_default())
            }
            call @ Sysno::bind => call.to_string(),
            _ => return None,
        };
        Some(Step(name))
    }

    fn on_path(&self, call: Sysno, pointer: u64) -> String {
        format!("{call} {}", short(&self.text(pointer).unwrap_or_default()))
    }

    /// The text at an address of the process.
    fn text(&self, pointer: u64) -> Option<String> {
        let memory = File::open(format!("/proc/{}/mem", self.thread)).ok()?;
        let mut bytes = [0; 256];
        let length = memory.read_at(&mut bytes, pointer).ok()?;
        let end = bytes[..length].iter().position(|it| *it == 0)?;
        Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
    }

    /// What a descriptor of the process refers to.
    fn file(&self, descriptor: u64) -> Option<String> {
        let link = fs::read_link(format!("/proc/{}/fd/{descriptor}", self.thread)).ok()?;
        Some(short(&link.to_string_lossy()))
    }

    /// Whether a descriptor is a netlink socket: only those are listed in `/proc/PID/net/netlink`, by their inodes.
    fn is_netlink(&self, descriptor: u64) -> bool {
        let Some(file) = self.file(descriptor) else { return false };
        let Some(inode) = file.strip_prefix("socket:[").and_then(|it| it.strip_suffix(']')) else {
            return false;
        };
        let sockets = fs::read_to_string(format!("/proc/{}/net/netlink", self.thread)).unwrap_or_default();
        sockets.lines().any(|it| it.split_whitespace().last() == Some(inode))
    }
}

/// The last two names of a path: those before are the sandbox's own.
fn short(path: &str) -> String {
    let names: Vec<_> = Path::new(path).iter().map(|it| it.to_string_lossy()).collect();
    match names.as_slice() {
        [.., parent, name] if names.len() > 3 => format!("/…/{parent}/{name}"),
        _ => path.to_owned(),
    }
}
