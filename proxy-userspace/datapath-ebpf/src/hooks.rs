//! Attaches the programs to a cgroup, or puts them under the links that are there.
//!
//! The one rule: nothing is ever detached to be attached again.

use std::{fs, io::ErrorKind, os::fd::AsFd, path::Path};

use aya::{
    Ebpf,
    programs::{CgroupAttachMode, CgroupSock, CgroupSockAddr, Program, ProgramFd, links::FdLink},
};
use aya_obj::generated::bpf_attach_type::{self, *};

use crate::{
    cgroup::Cgroup,
    error::{ATTACH, Error},
    failpoint,
    pins::{self, Pins},
    raw_bpf,
};

/// The hooks, each with a program of its name, and where the kernel attaches it. Those that lead away ([`LEADING`]) come
/// last, so that no socket is ever translated that could not be translated back, or would leave something behind.
pub(super) const HOOKS: [(&str, bpf_attach_type); 11] = [
    ("sock_release", BPF_CGROUP_INET_SOCK_RELEASE),
    ("recvmsg4", BPF_CGROUP_UDP4_RECVMSG),
    ("recvmsg6", BPF_CGROUP_UDP6_RECVMSG),
    ("getpeername4", BPF_CGROUP_INET4_GETPEERNAME),
    ("getpeername6", BPF_CGROUP_INET6_GETPEERNAME),
    ("bind4", BPF_CGROUP_INET4_BIND),
    ("bind6", BPF_CGROUP_INET6_BIND),
    ("sendmsg4", BPF_CGROUP_UDP4_SENDMSG),
    ("sendmsg6", BPF_CGROUP_UDP6_SENDMSG),
    ("connect4", BPF_CGROUP_INET4_CONNECT),
    ("connect6", BPF_CGROUP_INET6_CONNECT),
];

/// From which of the hooks on sockets are led away from the address that they asked for.
const LEADING: usize = 7;

/// How the programs came to be in effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Attached {
    /// Links that were made.
    pub(super) made: usize,
    /// Links that were there and got another program.
    pub(super) updated: usize,
}

/// Whether the links that are there lead to this cgroup, or to one that is gone.
///
/// # Errors
///
/// If one leads to another cgroup that lives. With links to both, one above the other, a socket would be translated by
/// the first and taken for an untranslated one by the second.
pub(super) fn check(cgroup: &Cgroup, pins: &Pins) -> Result<(), Error> {
    for (hook, _) in HOOKS {
        let pin = pins.links().join(hook);
        let link = match raw_bpf::obj_get(&pin) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            link => link.map_err(Error::syscall("BPF_OBJ_GET", pin.display()))?,
        };
        let there = cgroup_of(&link, &pin)?;
        if there != 0 && there != cgroup.id() {
            return Err(Error::OtherCgroup { path: cgroup.path().to_path_buf(), pin, id: there });
        }
    }
    Ok(())
}

/// Loads every program, which is when the kernel verifies it. Nothing is attached yet.
pub(super) fn load(ebpf: &mut Ebpf) -> Result<(), Error> {
    for (hook, _) in HOOKS {
        match program(ebpf, hook)? {
            Kind::Address(program) => program.load(),
            Kind::Socket(program) => program.load(),
        }
        .map_err(failed("load", hook))?;
    }
    Ok(())
}

/// Brings every program into effect on the cgroup, and pins it.
///
/// # Errors
///
/// What was attached for the first time and leads away is taken back. The rest stays, for sockets that were led meanwhile;
/// links that were there stay, too, with the old program or the new one.
pub(super) fn attach(ebpf: &mut Ebpf, cgroup: &Cgroup, pins: &Pins) -> Result<Attached, Error> {
    let mut attached = Attached::default();
    let mut leading = Vec::new();
    for (index, (hook, _)) in HOOKS.into_iter().enumerate() {
        if index == HOOKS.len() / 2 {
            failpoint::point("half-attached");
        }
        let pin = pins.links().join(hook);
        match put_in_effect(program(ebpf, hook)?, hook, cgroup, &pin) {
            Ok(true) => {
                attached.made += 1;
                leading.extend((index >= LEADING).then_some(pin));
            }
            Ok(false) => attached.updated += 1,
            Err(error) => {
                for pin in leading {
                    // The first error is the one to be told; what stays is taken over by the next attempt.
                    let _ = take_back(&pin);
                }
                return Err(error);
            }
        }
        let mut program = program(ebpf, hook)?;
        pins::replace(&pins.programs().join(hook), |path| program.pin(path))?;
    }
    Ok(attached)
}

/// Takes every program out of effect, before the call returns, and removes the pins of their links.
pub(super) fn detach(pins: &Pins) -> Result<(), Error> {
    detach_unknown(pins)?;
    // First those that lead away: what is translated can be translated back to the last.
    for (hook, _) in HOOKS.into_iter().rev() {
        let pin = pins.links().join(hook);
        take_back(&pins::beside(&pin))?;
        take_back(&pin)?;
    }
    Ok(())
}

/// Takes a program out of effect, before the call returns, and removes the pin of its link.
fn take_back(pin: &Path) -> Result<(), Error> {
    if let Ok(link) = raw_bpf::obj_get(pin) {
        // An older kernel detaches a little later, when the pin is gone.
        let _ = raw_bpf::link_detach(link.as_fd());
    }
    pins::remove_pin(pin)
}

/// Takes programs out of effect at hooks that this version does not know, as a later one may have left them: they lead by
/// maps that nobody updates any more. Returns the names of those that there were.
pub(super) fn detach_unknown(pins: &Pins) -> Result<Vec<String>, Error> {
    let mut detached = Vec::new();
    for pin in pins.all_links()? {
        if HOOKS
            .iter()
            .map(|(hook, _)| pins.links().join(hook))
            .any(|it| pin == it || pin == pins::beside(&it))
        {
            continue;
        }
        // What cannot be opened is no link, and not ours.
        let Ok(link) = raw_bpf::obj_get(&pin) else { continue };
        match raw_bpf::link_detach(link.as_fd()) {
            // The kernel takes one of a kind that cannot be detached off a little later, when the pin is gone.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            Err(error) if error.kind() == ErrorKind::InvalidInput => continue,
            result => result.map_err(Error::syscall("BPF_LINK_DETACH", pin.display()))?,
        }
        pins::remove_pin(&pin)?;
        detached.push(pin.file_name().unwrap_or_default().to_string_lossy().into_owned());
    }
    Ok(detached)
}

/// Updates the pinned link, or makes one and pins it; true if it was made.
fn put_in_effect(
    mut program: Kind<'_>,
    hook: &'static str,
    cgroup: &Cgroup,
    pin: &Path,
) -> Result<bool, Error> {
    let beside = pins::beside(pin);
    if !pin.exists() && beside.exists() {
        // Somebody died between making a link and giving it its name: it is in effect.
        fs::rename(&beside, pin).map_err(Error::syscall("rename", pin.display()))?;
    }
    match raw_bpf::obj_get(pin) {
        Ok(link) if cgroup_of(&link, pin)? == cgroup.id() => {
            let fd = program.fd(hook)?;
            return raw_bpf::link_update(link.as_fd(), fd.as_fd())
                .map(|()| false)
                .map_err(Error::syscall("BPF_LINK_UPDATE", pin.display()));
        }
        // Its cgroup was removed, and it went with it: a link for this cgroup takes the pin's place.
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(Error::syscall("BPF_OBJ_GET", pin.display())(error)),
    }
    let link = program.attach(cgroup, hook)?;
    pins::replace(pin, |path| {
        let pinned = link.pin(path).map(drop);
        failpoint::point("link-unnamed");
        pinned.map_err(Error::pin(path))
    })?;
    Ok(true)
}

/// The id of the cgroup that a link is attached to, 0 if it is gone.
fn cgroup_of(link: &impl AsFd, pin: &Path) -> Result<u64, Error> {
    raw_bpf::link_cgroup(link.as_fd()).map_err(Error::syscall("BPF_OBJ_GET_INFO_BY_FD", pin.display()))
}

/// A program of either kind that we have; aya has a type for each.
enum Kind<'a> {
    /// Sees the address that a system call names.
    Address(&'a mut CgroupSockAddr),
    /// Sees a socket.
    Socket(&'a mut CgroupSock),
}

impl Kind<'_> {
    fn fd(&self, hook: &'static str) -> Result<&ProgramFd, Error> {
        match self {
            Self::Address(program) => program.fd(),
            Self::Socket(program) => program.fd(),
        }
        .map_err(failed("open", hook))
    }

    fn pin(&mut self, path: &Path) -> Result<(), Error> {
        match self {
            Self::Address(program) => program.pin(path),
            Self::Socket(program) => program.pin(path),
        }
        .map_err(Error::pin(path))
    }

    /// Makes a link.
    ///
    /// aya hands the mode to the kernel as link flags, which refuses any but 0. `Single` is that 0, and for a link it
    /// means "beside others", not alone (aya issue 1078).
    fn attach(&mut self, cgroup: &Cgroup, hook: &'static str) -> Result<FdLink, Error> {
        const MODE: CgroupAttachMode = CgroupAttachMode::Single;
        match self {
            Self::Address(program) => {
                let id = program.attach(cgroup.dir(), MODE).map_err(failed(ATTACH, hook))?;
                let link = program.take_link(id).map_err(failed("take the link", hook))?;
                FdLink::try_from(link).map_err(failed("take the link", hook))
            }
            Self::Socket(program) => {
                let id = program.attach(cgroup.dir(), MODE).map_err(failed(ATTACH, hook))?;
                let link = program.take_link(id).map_err(failed("take the link", hook))?;
                FdLink::try_from(link).map_err(failed("take the link", hook))
            }
        }
    }
}

fn program<'a>(ebpf: &'a mut Ebpf, hook: &'static str) -> Result<Kind<'a>, Error> {
    match ebpf.program_mut(hook) {
        Some(Program::CgroupSockAddr(program)) => Ok(Kind::Address(program)),
        Some(Program::CgroupSock(program)) => Ok(Kind::Socket(program)),
        _ => Err(Error::Incomplete(format!("program {hook}"))),
    }
}

fn failed<E: std::error::Error + Send + Sync + 'static>(
    call: &'static str,
    program: &'static str,
) -> impl FnOnce(E) -> Error {
    move |source| Error::Program { call, program, source: Box::new(source) }
}
