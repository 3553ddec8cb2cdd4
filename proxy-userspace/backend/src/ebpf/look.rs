//! Which programs are in effect on a cgroup: not what was attached, but what the kernel says.
//!
//! The one rule: it only looks. Whoever else has programs there is named, and nothing is changed.

use std::{
    collections::BTreeMap,
    fmt,
    io::{self, ErrorKind},
    os::fd::AsFd,
    path::{Path, PathBuf},
};

use aya::programs::loaded_programs;

use super::{
    cgroup::{Cgroup, NESTED, NESTED_REMEDY, Reach},
    error::Error,
    hooks::HOOKS,
    pins::Pins,
    sys,
};

/// What is in effect on a cgroup, hook by hook.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hooks {
    /// The cgroup.
    pub cgroup: PathBuf,
    /// Who is not served there who should be, and what to do about it.
    pub unreached: Option<String>,
    /// Every hook that this program uses.
    pub hooks: Vec<Hook>,
    /// Every table of nftables that is ours, by a name like a hook's, and whether it is as it was written.
    pub tables: Vec<(&'static str, bool)>,
}

/// One hook of a cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hook {
    /// Its name, as in `connect4`.
    pub name: &'static str,
    /// The kernel's id of our program, if a link of ours is pinned.
    pub program: Option<u32>,
    /// Whether our program is among those that the kernel runs there.
    pub in_effect: bool,
    /// Programs of others that the kernel runs there too.
    pub others: Vec<Other>,
}

/// A program that is not ours.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Other {
    /// The kernel's id of it.
    pub id: u32,
    /// Its name, as far as the kernel keeps it (15 bytes); empty if it has none or could not be asked for.
    pub name: String,
}

impl fmt::Display for Other {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.name.is_empty() { "one whose name is not known" } else { &self.name };
        write!(f, "{name} (id {})", self.id)
    }
}

impl Hooks {
    /// The hooks at which our program is not in effect.
    pub fn missing(&self) -> impl Iterator<Item = &Hook> {
        self.hooks.iter().filter(|it| !it.in_effect)
    }

    /// The tables that are not as they were written.
    pub fn missing_tables(&self) -> impl Iterator<Item = &'static str> {
        self.tables.iter().filter(|(_, is_there)| !is_there).map(|(name, _)| *name)
    }

    /// Programs of others, each with the hooks that it runs at.
    pub fn others(&self) -> BTreeMap<&Other, Vec<&'static str>> {
        let mut others = BTreeMap::<_, Vec<_>>::new();
        for hook in &self.hooks {
            for other in &hook.others {
                others.entry(other).or_default().push(hook.name);
            }
        }
        others
    }

    /// Whether our programs are in effect at every hook.
    pub fn are_in_effect(&self) -> bool {
        self.missing().next().is_none()
    }
}

/// Looks at a cgroup by its path, at that which a start takes if none is named, and at the links below `pin_dir`.
///
/// # Errors
///
/// If the cgroup cannot be opened, or the kernel refuses to tell.
pub fn look_at(cgroup: Option<&Path>, pin_dir: &Path) -> Result<Hooks, Error> {
    look(&Cgroup::open(cgroup)?, &Pins::new(pin_dir))
}

pub(super) fn look(cgroup: &Cgroup, pins: &Pins) -> Result<Hooks, Error> {
    let hooks = HOOKS.into_iter().map(|(name, attach_type)| {
        let program = linked(&pins.links().join(name))?;
        let running = sys::programs_in_effect(cgroup.as_fd(), attach_type)
            .map_err(Error::syscall("BPF_PROG_QUERY", format!("{name} on {}", cgroup.path().display())))?;
        let in_effect = program.is_some_and(|it| running.contains(&it));
        let others = running.into_iter().filter(|it| Some(*it) != program);
        let others = others.map(|id| Other { id, name: name_of(id) }).collect();
        Ok(Hook { name, program, in_effect, others })
    });
    let path = cgroup.path().to_path_buf();
    let unreached =
        (cgroup.reach() == Reach::Nested).then(|| format!("{} {NESTED}; {NESTED_REMEDY}", path.display()));
    Ok(Hooks { cgroup: path, unreached, hooks: hooks.collect::<Result<_, _>>()?, tables: Vec::new() })
}

/// The program under the link that is pinned there, if one is.
fn linked(pin: &Path) -> Result<Option<u32>, Error> {
    match sys::obj_get(pin) {
        Ok(link) => sys::link_program(link.as_fd()).map(Some),
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
