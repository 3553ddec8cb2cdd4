//! What the kernel says is in effect.

use std::{collections::BTreeMap, fmt, path::PathBuf};

/// Which programs and tables are in effect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttachStatus {
    /// The cgroup whose hooks were queried.
    pub cgroup: PathBuf,
    /// Whose sockets are not served though they should be, with the remedy.
    pub unreached: Option<String>,
    /// Every hook that the socket path uses.
    pub hooks: Vec<HookStatus>,
    /// Our nftables tables, by a name like a hook's, and whether each is as it was written.
    pub tables: Vec<(&'static str, bool)>,
}

/// One hook of a cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookStatus {
    /// The name of the hook, such as `connect4`.
    pub name: &'static str,
    /// The kernel's id of our program, if a link of ours is pinned.
    pub program: Option<u32>,
    /// Whether the kernel runs our program there.
    pub is_attached: bool,
    /// Other programs that the kernel runs there.
    pub foreign: Vec<ForeignProgram>,
}

/// A program that is not ours.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ForeignProgram {
    pub id: u32,
    /// Its name as the kernel keeps it (15 bytes); empty if it has none or cannot be queried.
    pub name: String,
}

impl fmt::Display for ForeignProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.name.is_empty() { "unnamed" } else { &self.name };
        write!(f, "{name} (id {})", self.id)
    }
}

impl AttachStatus {
    pub fn missing(&self) -> impl Iterator<Item = &HookStatus> {
        self.hooks.iter().filter(|it| !it.is_attached)
    }

    pub fn missing_tables(&self) -> impl Iterator<Item = &'static str> {
        self.tables.iter().filter(|(_, is_there)| !is_there).map(|(name, _)| *name)
    }

    /// Programs that are not ours, each with the hooks that it runs at.
    pub fn foreign_programs(&self) -> BTreeMap<&ForeignProgram, Vec<&'static str>> {
        let mut foreign = BTreeMap::<_, Vec<_>>::new();
        for hook in &self.hooks {
            for program in &hook.foreign {
                foreign.entry(program).or_default().push(hook.name);
            }
        }
        foreign
    }

    pub fn is_complete(&self) -> bool {
        self.missing().next().is_none()
    }
}
