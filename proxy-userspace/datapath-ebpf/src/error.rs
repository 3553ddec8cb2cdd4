//! What can go wrong between the backend and the kernel, and what to do about it.

use std::{
    io,
    path::{Path, PathBuf},
};

use aya::{EbpfError, maps::MapError, pin::PinError};

use crate::capabilities;

/// Why the data plane could not be read, written or put in place.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("{call} of {what} failed{}", remedy(.source))]
    Syscall {
        /// The call.
        call: &'static str,
        /// The map, link or path.
        what: String,
        /// The errno.
        source: io::Error,
    },
    /// The side word names no side: somebody else writes to our maps.
    #[error("the side word is {0}, neither 0 nor 1: run `kube-proxy-ebpf cleanup` and start again")]
    SideWord(u32),
    /// A pin holds something else than this binary puts there.
    #[error(
        "{} holds {found}, not {expected}: it is not ours or of an unknown version; \
         run `kube-proxy-ebpf cleanup`, or choose another --pin-dir",
        path.display()
    )]
    ForeignPin {
        /// The pin.
        path: PathBuf,
        /// What is there.
        found: String,
        /// What should be there.
        expected: String,
    },
    /// There is no generation to be read.
    #[error("no state is active below {}: no instance of this version has served there", .0.display())]
    Nothing(PathBuf),
    /// Whenever all of it was read, something else was in force.
    #[error("the active state below {} changes faster than it can be read: try again when less changes", .0.display())]
    Restless(PathBuf),
    /// The folder for pins lies on another kind of file system.
    #[error("{} is not on a bpf file system: mount one with `mount -t bpf bpf DIR`, or choose another --pin-dir", .0.display())]
    NotBpffs(PathBuf),
    /// The folder for pins belongs to a user who may not load programs.
    #[error(
        "{} belongs to user {owner}, who could put something else in the place of what is pinned: \
         remove it, or choose another --pin-dir",
        path.display()
    )]
    ForeignPinDir {
        /// The folder.
        path: PathBuf,
        /// The user's id.
        owner: u32,
    },
    /// This process lacks the capability without which nothing can be begun.
    #[error("this process may not load programs{PRIVILEGES}")]
    Powerless,
    /// The folder for pins has a name that the bpf file system refuses.
    #[error("{} has a dot in its name, which the bpf file system refuses: choose another --pin-dir", .0.display())]
    DottedPinDir(PathBuf),
    /// The cgroup lies on another kind of file system.
    #[error("{} is not a cgroup2 folder: give one with --cgroup or --socket-lb-exclude-cgroup (`mount -t cgroup2` shows where they are)", .0.display())]
    NotCgroup2(PathBuf),
    /// There is nothing where the cgroup should be.
    #[error("{} does not exist: make it with mkdir, or name another cgroup with --cgroup", .0.display())]
    NoCgroup(PathBuf),
    /// A cgroup cannot be left alone.
    #[error(
        "{} cannot be left alone: it is the root, or more than 23 levels below it; \
         name the cgroup of the pods or machines that are meant with --socket-lb-exclude-cgroup",
        .0.display()
    )]
    BadExclusion(PathBuf),
    /// More cgroups are to be left alone than there is room for.
    #[error(
        "{0} cgroups cannot be left alone, only 64: name one that is above several with --socket-lb-exclude-cgroup"
    )]
    TooManyExclusions(usize),
    /// The programs are attached to another cgroup.
    #[error(
        "{} says that the programs are attached to another cgroup (id {id}), not to {}: \
         name that one with --cgroup, or run `kube-proxy-ebpf cleanup` first",
        pin.display(), path.display()
    )]
    OtherCgroup {
        /// The cgroup that was named.
        path: PathBuf,
        /// The link.
        pin: PathBuf,
        /// The id of the cgroup it leads to.
        id: u64,
    },
    /// Somebody else works on the same pins.
    #[error("another instance is running on {}: stop it first, or choose another --pin-dir", .0.display())]
    Locked(PathBuf),
    /// The binary was compiled without its kernel half.
    #[error("this binary was built without its kernel object: build it with `cargo xtask build`")]
    NoKernelObject,
    /// The kernel object could not be loaded.
    #[error("loading the kernel object failed{}", remedy_of_load(.0))]
    Load(#[source] Box<EbpfError>),
    /// A program could not be loaded, pinned or attached.
    #[error("{call} of program {program} failed{}", remedy_of_program(call, &**source))]
    Program {
        /// What was tried.
        call: &'static str,
        /// The program, which bears the name of its hook.
        program: &'static str,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A map of the kernel object could not be used.
    #[error("map {name} cannot be used{}", remedy_within(source))]
    Map {
        /// The map.
        name: String,
        /// Why.
        source: Box<MapError>,
    },
    /// Something could not be pinned.
    #[error("pinning {} failed", path.display())]
    Pin {
        /// The pin.
        path: PathBuf,
        /// Why.
        source: Box<PinError>,
    },
    /// The kernel object lacks a part that user space needs.
    #[error("the kernel object has no {0}: it is from another build; build both with `cargo xtask build`")]
    Incomplete(String),
}

impl Error {
    /// A failed system call, for `map_err`.
    pub(crate) fn syscall(call: &'static str, what: impl ToString) -> impl FnOnce(io::Error) -> Self {
        let what = what.to_string();
        move |source| Self::Syscall { call, what, source }
    }

    /// The same, for errors of the nix crate.
    pub(crate) fn errno(call: &'static str, what: impl ToString) -> impl FnOnce(nix::Error) -> Self {
        let syscall = Self::syscall(call, what);
        move |errno| syscall(errno.into())
    }

    /// A failed pin, for `map_err`.
    pub(crate) fn pin(path: &Path) -> impl FnOnce(PinError) -> Self {
        move |source| Self::Pin { path: path.to_path_buf(), source: Box::new(source) }
    }

    /// An unusable map, for `map_err`.
    pub(crate) fn map(name: impl ToString) -> impl FnOnce(MapError) -> Self {
        let name = name.to_string();
        move |source| Self::Map { name, source: Box::new(source) }
    }
}

const PRIVILEGES: &str = " (run as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON)";

/// What is said of the call that puts a program in effect.
pub(super) const ATTACH: &str = "attach";

/// Of programs on one cgroup either all let others in (`BPF_F_ALLOW_MULTI`), or there is only one (bpf(2), BPF_PROG_ATTACH).
const EXCLUSIVE: &str = " (another program keeps this hook for itself, on this cgroup or one above: \
                         `bpftool cgroup tree` shows which, `bpftool cgroup detach` takes it off)";

/// Before Linux 5.11 a map that is too large is refused like one that is not allowed.
const LOCKED_MEMORY: &str = " (maps count as locked memory before Linux 5.11: add CAP_SYS_RESOURCE, or raise the limit, `ulimit -l unlimited`)";

/// What helps against an errno, where we know.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) if !capabilities::is_any_missing() && capabilities::memlock_limit().is_some() => {
            LOCKED_MEMORY
        }
        Some(libc::EPERM | libc::EACCES) => PRIVILEGES,
        Some(libc::ENOMEM) => {
            " (the memory limit of this process's cgroup, or RLIMIT_MEMLOCK before Linux 5.11, is too low)"
        }
        _ => "",
    }
}

/// The same for a failed load. aya asks the kernel first what it can do, takes a refusal for a no, and fails later.
fn remedy_of_load(error: &EbpfError) -> &'static str {
    if capabilities::is_any_missing() { PRIVILEGES } else { remedy_within(error) }
}

/// The same for a program. Of who lacks a capability the verifier asks more, and may say that the program is too large
/// for it. Who may load it may attach it, unless the kernel was told to keep others out.
fn remedy_of_program(call: &str, error: &(dyn std::error::Error + 'static)) -> &'static str {
    match io_within(error).and_then(io::Error::raw_os_error) {
        _ if capabilities::is_any_missing() => PRIVILEGES,
        Some(libc::EPERM) if call == ATTACH => EXCLUSIVE,
        _ => remedy_within(error),
    }
}

/// The same for an error that holds the errno somewhere inside.
fn remedy_within(error: &(dyn std::error::Error + 'static)) -> &'static str {
    io_within(error).map_or("", remedy)
}

fn io_within<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a io::Error> {
    std::iter::successors(Some(error), |it| it.source()).find_map(|it| it.downcast_ref())
}
