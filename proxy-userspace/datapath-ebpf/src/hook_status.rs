//! Which programs are in effect on a cgroup: not what was attached, but what the kernel says.
//!
//! The one rule: it only looks. Whoever else has programs there is named, and nothing is changed.

use std::{
    io::{self, ErrorKind},
    os::fd::AsFd,
    path::Path,
};

use aya::programs::loaded_programs;
use datapath::{AttachStatus, ForeignProgram, HookStatus};

use crate::{
    cgroup::{Cgroup, NESTED, NESTED_REMEDY, Reach},
    error::Error,
    hooks::HOOKS,
    pins::Pins,
    raw_bpf,
};

/// Looks at a cgroup by its path, at that which a start takes if none is named, and at the links below `pin_dir`.
///
/// # Errors
///
/// If the cgroup cannot be opened, or the kernel refuses to tell.
pub fn query_at(cgroup: Option<&Path>, pin_dir: &Path) -> Result<AttachStatus, Error> {
    query(&Cgroup::open(cgroup)?, &Pins::new(pin_dir))
}

pub(crate) fn query(cgroup: &Cgroup, pins: &Pins) -> Result<AttachStatus, Error> {
    let hooks = HOOKS.into_iter().map(|(name, attach_type)| {
        let program = linked(&pins.links().join(name))?;
        let running = raw_bpf::programs_in_effect(cgroup.as_fd(), attach_type)
            .map_err(Error::syscall("BPF_PROG_QUERY", format!("{name} on {}", cgroup.path().display())))?;
        let is_attached = program.is_some_and(|it| running.contains(&it));
        let foreign = running.into_iter().filter(|it| Some(*it) != program);
        let foreign = foreign.map(|id| ForeignProgram { id, name: name_of(id) }).collect();
        Ok(HookStatus { name, program, is_attached, foreign })
    });
    let path = cgroup.path().to_path_buf();
    let unreached =
        (cgroup.reach() == Reach::Nested).then(|| format!("{} {NESTED}; {NESTED_REMEDY}", path.display()));
    Ok(AttachStatus { cgroup: path, unreached, hooks: hooks.collect::<Result<_, _>>()?, tables: Vec::new() })
}

/// The program under the link that is pinned there, if one is.
fn linked(pin: &Path) -> Result<Option<u32>, Error> {
    match raw_bpf::obj_get(pin) {
        Ok(link) => raw_bpf::link_program(link.as_fd()).map(Some),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
    .map_err(|error: io::Error| Error::syscall("BPF_OBJ_GET", pin.display())(error))
}

/// What a program is called.
fn name_of(id: u32) -> String {
    // It may be gone by now, and then it has no name.
    let found = loaded_programs().flatten().find(|it| it.id() == id);
    found.and_then(|it| it.name_as_str().map(ToOwned::to_owned)).unwrap_or_default()
}
