//! Loads the programs, and attaches them to a cgroup or updates the existing links to them.
//!
//! Invariant: nothing is detached in order to be attached again.

use std::{fs, io::ErrorKind, os::fd::AsFd, path::Path, thread, time::Duration};

use aya::{
    Ebpf,
    programs::{CgroupAttachMode, Program, links::FdLink},
};
use aya_obj::generated::bpf_attach_type::{self, *};

use model::error_chain;

use crate::{
    error::{ATTACH, Error},
    host::{cgroup::Cgroup, failpoint, raw_bpf},
    maps::pins::{self, Pins},
    programs::{
        links::{self, detach_link, failed},
        uplinks::{self, UplinkPin},
    },
};

/// The hooks, each with a program of the same name, and their attach types. Those that redirect ([`redirects`]) come last, so
/// that no socket is redirected before the hooks are attached that translate back and clean up.
pub(crate) const HOOKS: [(&str, bpf_attach_type); 12] = [
    ("sock_release", BPF_CGROUP_INET_SOCK_RELEASE),
    ("sock_ops", BPF_CGROUP_SOCK_OPS),
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

/// The hook that can be missing: without it no endpoint is ejected. Programs that only observe connections are attached
/// there, too.
pub(crate) const OPTIONAL: &str = "sock_ops";

/// How long the hooks that translate replies outlast those that redirect: replies to the last datagrams are on their way.
const REPLY_TIME: Duration = Duration::from_secs(1);

/// Whether the programs at hooks of this type redirect sockets. Others translate replies, observe, or clean up.
fn redirects(hook: bpf_attach_type) -> bool {
    matches!(
        hook,
        BPF_CGROUP_UDP4_SENDMSG
            | BPF_CGROUP_UDP6_SENDMSG
            | BPF_CGROUP_INET4_CONNECT
            | BPF_CGROUP_INET6_CONNECT
    )
}

/// Checks that the existing links are attached to this cgroup, or to one that was removed.
///
/// # Errors
///
/// If one is attached to another cgroup that exists. With links to two cgroups, one above the other, a socket would be
/// translated by the first program and be taken for an untranslated one by the second.
pub(crate) fn check(cgroup: &Cgroup, pins: &Pins) -> Result<(), Error> {
    for (hook, _) in HOOKS {
        let pin = pins.links().join(hook);
        let Some(link) = pins::open(&pin)? else { continue };
        let id = cgroup_of(&link, &pin)?;
        if id != 0 && id != cgroup.id {
            return Err(Error::OtherCgroup { path: cgroup.path.clone(), pin, id });
        }
    }
    Ok(())
}

/// Loads every program into the kernel, which verifies it. Nothing is attached yet.
pub(crate) fn load(ebpf: &mut Ebpf) -> Result<(), Error> {
    HOOKS.into_iter().try_for_each(|(hook, _)| load_program(ebpf, hook))
}

/// Attaches every program to the cgroup, and pins it.
///
/// # Errors
///
/// New links of redirecting hooks are detached again. The others stay attached, for sockets that were redirected meanwhile;
/// existing links stay, too, with the old program or the new one.
pub(crate) fn attach(ebpf: &mut Ebpf, cgroup: &Cgroup, pins: &Pins) -> Result<(), Error> {
    let mut created = 0;
    let mut redirecting = Vec::new();
    for (index, (hook, attach_type)) in HOOKS.into_iter().enumerate() {
        if index == HOOKS.len() / 2 {
            failpoint::point("half-attached");
        }
        let pin = pins.links().join(hook);
        match attach_or_update(program(ebpf, hook)?, hook, cgroup, &pin) {
            Ok(true) => {
                created += 1;
                redirecting.extend(redirects(attach_type).then_some(pin));
            }
            Ok(false) => {}
            Err(error) if hook == OPTIONAL => {
                tracing::warn!(error = error_chain(&error), "failing endpoints are not ejected");
                continue;
            }
            Err(error) => {
                for pin in redirecting {
                    // The first error is reported; a link that stays is updated by the next attempt.
                    let _ = detach_link(&pin);
                }
                return Err(error);
            }
        }
        let program = program(ebpf, hook)?;
        pins::replace(&pins.programs().join(hook), |path| program.pin(path).map_err(Error::pin(path)))?;
    }
    let replaced = HOOKS.len() - created;
    tracing::info!(cgroup = %cgroup.path.display(), new = created, replaced, "programs attached");
    Ok(())
}

/// Detaches every program, before the call returns, and removes the pins of the links. Takes [`REPLY_TIME`] if sockets were
/// redirected.
pub(crate) fn detach(pins: &Pins) -> Result<(), Error> {
    uplinks::detach(pins)?;
    detach_unknown(pins)?;
    let pin = |(hook, _): &(&str, _)| pins.links().join(hook);
    let detach = |hooks: &[_]| {
        hooks.iter().rev().map(pin).try_for_each(|pin| {
            detach_link(&pins::staging_path(&pin))?;
            detach_link(&pin)
        })
    };
    let (redirecting, others): (Vec<_>, Vec<_>) = HOOKS.into_iter().partition(|(_, it)| redirects(*it));
    let has_redirected = redirecting.iter().map(pin).any(|it| it.exists());
    detach(&redirecting)?;
    if has_redirected {
        thread::sleep(REPLY_TIME);
    }
    detach(&others)
}

/// Detaches programs from hooks that this version does not know, which a later version may have attached: their maps are no
/// longer updated.
pub(crate) fn detach_unknown(pins: &Pins) -> Result<(), Error> {
    let known = HOOKS.map(|(hook, _)| pins.links().join(hook));
    for pin in pins.all_links()? {
        if UplinkPin::of(&pin).is_some() || known.iter().any(|it| pin == *it || pin == pins::staging_path(it))
        {
            continue;
        }
        // What cannot be opened is not a link of ours.
        let Ok(link) = raw_bpf::obj_get(&pin) else { continue };
        match raw_bpf::link_detach(link.as_fd()) {
            // Link types without this operation are detached some time after the pin is removed.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            Err(error) if error.kind() == ErrorKind::InvalidInput => continue,
            result => result.map_err(Error::syscall("BPF_LINK_DETACH", pin.display()))?,
        }
        pins::remove_pin(&pin)?;
        let hook = pin.file_name().unwrap_or_default().display();
        tracing::info!(%hook, "program of another version detached");
    }
    Ok(())
}

/// Updates the pinned link, or creates one and pins it; true if it was created.
fn attach_or_update(
    program: &mut Program,
    hook: &'static str,
    cgroup: &Cgroup,
    pin: &Path,
) -> Result<bool, Error> {
    let staging = pins::staging_path(pin);
    if !pin.exists() && staging.exists() {
        // A process died after it created the link, and before it renamed its pin: the link is attached.
        fs::rename(&staging, pin).map_err(Error::syscall("rename", pin.display()))?;
    }
    // If its cgroup was removed, which detached it, a link to the new cgroup replaces it.
    if let Some(link) = pins::open(pin)?
        && cgroup_of(&link, pin)? == cgroup.id
    {
        return links::update(&link, program.fd().map_err(failed("open", hook))?, pin).map(|()| false);
    }
    let link = create_link(program, cgroup, hook)?;
    pins::replace(pin, |path| {
        let pinned = link.pin(path).map(drop);
        failpoint::point("link-unnamed");
        pinned.map_err(Error::pin(path))
    })?;
    Ok(true)
}

/// The id of the cgroup that a link is attached to, 0 if that was removed.
fn cgroup_of(link: &impl AsFd, pin: &Path) -> Result<u64, Error> {
    raw_bpf::link_cgroup(link.as_fd()).map_err(Error::syscall("BPF_OBJ_GET_INFO_BY_FD", pin.display()))
}

/// Evaluates an expression for a program of any type that hooks have.
macro_rules! for_program {
    ($program:expr, $hook:expr, $it:ident => $then:expr) => {
        match $program {
            Program::CgroupSockAddr($it) => $then,
            Program::CgroupSock($it) => $then,
            Program::SockOps($it) => $then,
            _ => return Err(Error::Incomplete(format!("program {}", $hook))),
        }
    };
}

pub(crate) fn load_program(ebpf: &mut Ebpf, hook: &'static str) -> Result<(), Error> {
    for_program!(program(ebpf, hook)?, hook, it => it.load()).map_err(failed("load", hook))
}

/// Creates a link.
///
/// aya passes the mode to the kernel as link flags, which must be 0. `Single` is that 0, and for a link it means
/// "beside others", not exclusive (aya issue 1078).
fn create_link(program: &mut Program, cgroup: &Cgroup, hook: &'static str) -> Result<FdLink, Error> {
    const MODE: CgroupAttachMode = CgroupAttachMode::Single;
    for_program!(program, hook, it => {
        let id = it.attach(&cgroup.dir, MODE).map_err(failed(ATTACH, hook))?;
        let link = it.take_link(id).map_err(failed("take the link", hook))?;
        FdLink::try_from(link).map_err(failed("take the link", hook))
    })
}

pub(crate) fn program<'a>(ebpf: &'a mut Ebpf, hook: &str) -> Result<&'a mut Program, Error> {
    ebpf.program_mut(hook).ok_or_else(|| Error::Incomplete(format!("program {hook}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hooks_that_redirect_come_last() {
        let last = HOOKS.into_iter().skip_while(|(_, it)| !redirects(*it));
        let names: Vec<_> = last.map(|(hook, _)| hook).collect();
        assert_eq!(names, ["sendmsg4", "sendmsg6", "connect4", "connect6"]);
    }
}
