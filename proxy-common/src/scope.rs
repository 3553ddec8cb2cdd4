//! Cgroups whose processes are left alone: known by their ids, and looked for on certain levels of the hierarchy.

/// How many levels there are, the root being level 0: as many as bits in the word that says which ones are looked at.
pub const LEVELS: u32 = 24;

/// How many cgroups can be left alone.
pub const MOST: u32 = 64;
