//! Errors of the eBPF datapath, with remedies.

use std::{
    io,
    path::{Path, PathBuf},
};

use aya::{EbpfError, maps::MapError, pin::PinError};

use crate::host::capabilities;

/// Why the datapath could not be read, written or attached. The messages say what has happened, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{call} of {what} failed{}", remedy(.source))]
    Syscall {
        call: &'static str,
        /// The map, link or path.
        what: String,
        source: io::Error,
    },
    /// The active-side word is invalid: another program has written to our maps.
    #[error("the active-side word is {0}, neither 0 nor 1: run `kube-proxy-ebpf cleanup` and start again")]
    InvalidActiveSide(u32),
    #[error(
        "{} is {found}, not {expected}: it belongs to another program or to an unknown version; \
         run `kube-proxy-ebpf cleanup`, or choose another --pin-dir",
        path.display()
    )]
    ForeignPin { path: PathBuf, found: String, expected: String },
    #[error("no state is active below {}: no instance of this version has applied one there", .0.display())]
    NotInitialized(PathBuf),
    #[error("the active state below {} changes faster than it can be read: try again later", .0.display())]
    ConcurrentUpdate(PathBuf),
    #[error("{} is not on a bpf file system: mount one with `mount -t bpf bpf DIR`, or choose another --pin-dir", .0.display())]
    NotBpffs(PathBuf),
    #[error(
        "{} belongs to user {owner}, who could replace what is pinned there: remove it, or choose another --pin-dir",
        path.display()
    )]
    ForeignPinDir { path: PathBuf, owner: u32 },
    #[error("this process may not load programs{PRIVILEGES}")]
    MissingCapabilities,
    #[error(
        "this process is in a user namespace, and Linux lets none load programs from there, whatever its capabilities: use \
         --backend nft, which can serve there, or run it outside of the namespace"
    )]
    UserNamespace,
    #[error("{} has a dot in its name, which the bpf file system refuses: choose another --pin-dir", .0.display())]
    DottedPinDir(PathBuf),
    #[error("{} is not a cgroup2 folder: give one with --cgroup or --socket-lb-exclude-cgroup (`mount -t cgroup2` shows where they are)", .0.display())]
    NotCgroup2(PathBuf),
    #[error("{} does not exist: create it with mkdir, or give another cgroup with --cgroup", .0.display())]
    NoCgroup(PathBuf),
    #[error(
        "{} cannot be excluded: it is the root, or more than 23 levels below it; \
         give the cgroup of certain pods or machines with --socket-lb-exclude-cgroup",
        .0.display()
    )]
    BadExclusion(PathBuf),
    #[error(
        "{0} cgroups cannot be excluded, at most 64: give a parent of several with --socket-lb-exclude-cgroup"
    )]
    TooManyExclusions(usize),
    #[error(
        "the link {} is attached to another cgroup (id {id}), not to {}: \
         give that cgroup with --cgroup, or run `kube-proxy-ebpf cleanup` first",
        pin.display(), path.display()
    )]
    OtherCgroup {
        path: PathBuf,
        pin: PathBuf,
        /// The id of the cgroup it is attached to.
        id: u64,
    },
    #[error("another instance is running on {}: stop it first, or choose another --pin-dir", .0.display())]
    Locked(PathBuf),
    /// The kernel did not take BTF or global data when that was tried.
    #[error(
        "the kernel refused BTF of functions or global data of programs, which Linux has since 5.10: start again; \
         it may have been short of memory for a moment"
    )]
    NoBtf,
    #[error("this binary was built without its kernel object: build it with `cargo xtask build`")]
    NoKernelObject,
    #[error("this binary was built without traced programs: build it with `cargo xtask build`")]
    NoTracedPrograms,
    #[error("no programs are attached yet, as no state is active: try again when `status` shows one")]
    NotAttached,
    #[error("{0} service ports or addresses cannot be traced at a time: trace by another filter")]
    TooManyTracedPorts(usize),
    #[error("links to interfaces need Linux 6.6")]
    NoLinksToInterfaces,
    #[error("loading the kernel object failed{}", remedy_of_load(.0))]
    Load(#[source] Box<EbpfError>),
    #[error("{call} of program {program} failed{}", remedy_of_program(call, &**source))]
    Program {
        call: &'static str,
        /// The program, which has the name of its hook.
        program: &'static str,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("map {name} cannot be used{}", remedy_within(source))]
    Map { name: String, source: Box<MapError> },
    #[error("pinning {} failed", path.display())]
    Pin { path: PathBuf, source: Box<PinError> },
    #[error(
        "the kernel object has no {0}: they are from different builds; build both with `cargo xtask build`"
    )]
    Incomplete(String),
}

impl Error {
    /// A failed system call, for `map_err`.
    pub(crate) fn syscall<E: Into<io::Error>>(
        call: &'static str,
        what: impl ToString,
    ) -> impl FnOnce(E) -> Self {
        let what = what.to_string();
        move |source| Self::Syscall { call, what, source: source.into() }
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

/// The operation of [`Error::Program`] that attaches a program.
pub(super) const ATTACH: &str = "attach";

/// `BPF_CGROUP_MAX_PROGS` of the kernel.
const FULL: &str = " (64 programs are attached to this hook of the cgroup already, which is the kernel's limit: \
                    `bpftool cgroup show` lists them, `bpftool cgroup detach` detaches one)";

/// A cgroup has either programs that all allow others (`BPF_F_ALLOW_MULTI`), or a single one (bpf(2), BPF_PROG_ATTACH).
const EXCLUSIVE: &str = " (another program is attached exclusively to this hook, on this cgroup or one above: \
                         `bpftool cgroup tree` shows which, `bpftool cgroup detach` detaches it)";

/// Before Linux 5.11 a map beyond the limit of locked memory fails with EPERM.
const LOCKED_MEMORY: &str = " (maps count as locked memory before Linux 5.11: add CAP_SYS_RESOURCE, or raise the limit, `ulimit -l unlimited`)";

/// The remedy for an errno, where one is known.
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

/// The remedy for a failed load. aya first probes the kernel's features, takes EPERM for a missing one, and fails later.
fn remedy_of_load(error: &EbpfError) -> &'static str {
    if capabilities::is_any_missing() { PRIVILEGES } else { remedy_within(error) }
}

/// The remedy for a program. With missing capabilities the verifier is stricter, and may report that the program is too
/// large. A process that may load a program may attach it, unless another one is attached exclusively.
fn remedy_of_program(call: &str, error: &(dyn std::error::Error + 'static)) -> &'static str {
    match io_within(error).and_then(io::Error::raw_os_error) {
        _ if capabilities::is_any_missing() => PRIVILEGES,
        Some(libc::EPERM) if call == ATTACH => EXCLUSIVE,
        Some(libc::E2BIG) if call == ATTACH => FULL,
        _ => remedy_within(error),
    }
}

/// The remedy for an error with an errno among its sources.
fn remedy_within(error: &(dyn std::error::Error + 'static)) -> &'static str {
    io_within(error).map_or("", remedy)
}

fn io_within<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a io::Error> {
    std::iter::successors(Some(error), |it| it.source()).find_map(|it| it.downcast_ref())
}
