//! The system calls that change something: BPF objects, netfilter, sockets, files.
//!
//! Calls that only read or wait, and those that concern the process alone, are no steps.

use std::{
    env,
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::Path,
    str::FromStr as _,
};

use anyhow::Result;
use nix::{libc, unistd::Pid};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
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

/// Which of the calls of one kind are steps, and what is printed beside their name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// `bpf(2)`, with its command.
    Bpf,
    /// Each, with the path to which this argument points.
    Path(usize),
    /// Those that may create or empty the file, with its path.
    Open,
    /// Those of a file, with its path.
    File,
    /// Those of a netlink socket.
    Netlink,
    Plain,
}

/// The system calls of which some are steps. A machine need not have all of them.
const CALLS: [(&str, Kind); 22] = [
    ("bpf", Kind::Bpf),
    ("mkdir", Kind::Path(0)),
    ("mkdirat", Kind::Path(1)),
    ("rmdir", Kind::Path(0)),
    ("unlink", Kind::Path(0)),
    ("unlinkat", Kind::Path(1)),
    ("rename", Kind::Path(1)),
    ("renameat", Kind::Path(3)),
    ("renameat2", Kind::Path(3)),
    ("link", Kind::Path(1)),
    ("linkat", Kind::Path(3)),
    ("symlink", Kind::Path(1)),
    ("mount", Kind::Path(1)),
    ("openat", Kind::Open),
    ("write", Kind::File),
    ("pwrite64", Kind::File),
    ("ftruncate", Kind::File),
    ("flock", Kind::File),
    ("fchmod", Kind::File),
    ("sendto", Kind::Netlink),
    ("sendmsg", Kind::Netlink),
    ("bind", Kind::Plain),
];

/// Lets a tracer stop this thread and its children at the system calls of which some are steps, and at no others.
pub(crate) fn stop_at_calls() -> Result<()> {
    let numbers =
        CALLS.iter().filter_map(|(name, _)| Some((i64::from(Sysno::from_str(name).ok()?.id()), Vec::new())));
    let filter = SeccompFilter::new(
        numbers.collect(),
        SeccompAction::Allow,
        SeccompAction::Trace(0),
        env::consts::ARCH.try_into()?,
    )?;
    Ok(seccompiler::apply_filter(&BpfProgram::try_from(filter)?)?)
}

/// A system call that a process is about to make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) thread: Pid,
    pub(crate) number: u64,
    pub(crate) arguments: [u64; 4],
}

impl Call {
    /// The step that this call is, if it is one, as it is printed.
    pub(crate) fn step(&self) -> Option<String> {
        let [first, second, flags, _] = self.arguments;
        let name = Sysno::new(usize::try_from(self.number).ok()?)?.name();
        let (_, kind) = CALLS.into_iter().find(|it| it.0 == name)?;
        let path = |pointer| short(&self.text(pointer).unwrap_or_default());
        let shown = match kind {
            Kind::Bpf => BPF_COMMANDS.into_iter().find(|it| it.0 == first)?.1.to_owned(),
            Kind::Path(argument) => path(self.arguments[argument]),
            Kind::Open if flags & (libc::O_CREAT | libc::O_TRUNC) as u64 != 0 => path(second),
            // Not its log.
            Kind::File if first > 2 => self.file(first).filter(|it| it.starts_with('/'))?,
            Kind::Netlink if self.is_netlink(first) => return Some(format!("netlink {name}")),
            Kind::Plain => return Some(name.to_owned()),
            Kind::Open | Kind::File | Kind::Netlink => return None,
        };
        Some(format!("{name} {shown}"))
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
