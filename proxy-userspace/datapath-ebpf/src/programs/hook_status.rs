//! The programs that the kernel runs at the hooks of a cgroup, ours and foreign ones. Read-only.

use std::{os::fd::AsFd, path::Path};

use aya::programs::loaded_programs;
use datapath::{AttachStatus, ForeignProgram, HookStatus};

use crate::{
    error::Error,
    host::{
        cgroup::{Cgroup, NESTED, NESTED_REMEDY, Reach},
        raw_bpf,
    },
    maps::pins::{self, Pins},
    programs::hooks::{HOOKS, OPTIONAL},
};

/// Queries the hooks of a cgroup, by default of the one that `run` would attach to, and compares them with the links below
/// `pin_dir`.
///
/// # Errors
///
/// If the cgroup cannot be opened, or the kernel refuses the query.
pub fn query_at(cgroup: Option<&Path>, pin_dir: &Path) -> Result<AttachStatus, Error> {
    query(&Cgroup::open(cgroup)?, &Pins::new(pin_dir))
}

pub(crate) fn query(cgroup: &Cgroup, pins: &Pins) -> Result<AttachStatus, Error> {
    let hooks = HOOKS.into_iter().map(|(name, attach_type)| {
        let program = linked_program(&pins.links().join(name))?;
        if name == OPTIONAL && program.is_none() {
            return Ok(None);
        }
        let effective = raw_bpf::effective_programs(cgroup.dir.as_fd(), attach_type)
            .map_err(Error::syscall("BPF_PROG_QUERY", format!("{name} on {}", cgroup.path.display())))?;
        let is_attached = program.is_some_and(|it| effective.contains(&it));
        let foreign = effective.into_iter().filter(|it| Some(*it) != program && name != OPTIONAL);
        let foreign = foreign.map(|id| ForeignProgram { id, name: name_of(id) }).collect();
        Ok(Some(HookStatus { name, program, is_attached, foreign }))
    });
    let path = cgroup.path.clone();
    let unreached =
        (cgroup.reach() == Reach::Nested).then(|| format!("{} {NESTED}; {NESTED_REMEDY}", path.display()));
    Ok(AttachStatus {
        cgroup: path,
        unreached,
        hooks: hooks.filter_map(Result::transpose).collect::<Result<_, _>>()?,
        tables: Vec::new(),
    })
}

/// The id of the program of a pinned link, if there is one.
fn linked_program(pin: &Path) -> Result<Option<u32>, Error> {
    let program = pins::open(pin)?.map(|link| raw_bpf::link_program(link.as_fd())).transpose();
    program.map_err(Error::syscall("BPF_OBJ_GET_INFO_BY_FD", pin.display()))
}

/// The name of a program; empty if it was unloaded meanwhile.
pub(crate) fn name_of(id: u32) -> String {
    let found = loaded_programs().flatten().find(|it| it.id() == id);
    found.and_then(|it| it.name_as_str().map(ToOwned::to_owned)).unwrap_or_default()
}
