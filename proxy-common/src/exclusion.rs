//! Limits of the excluded cgroups, whose processes are not load-balanced.

/// How many levels of the cgroup hierarchy are supported, the root being level 0: one bit each in the word that selects the
/// levels to check.
pub const MAX_LEVELS: u32 = 24;

/// How many cgroups can be excluded.
pub const MAX_EXCLUDED: u32 = 64;
