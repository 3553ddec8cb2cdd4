//! The excluded cgroups, whose processes are not load-balanced: their limits, and which sockets are meant.

/// How many levels of the cgroup hierarchy are supported, the root being level 0: one bit each in the word that selects the
/// levels to check.
pub const MAX_LEVELS: u32 = 24;

/// How many cgroups can be excluded by their paths.
pub const MAX_EXCLUDED: u32 = 64;

/// How many pods can be excluded beside them.
pub const MAX_EXCLUDED_PODS: u32 = 1_024;

/// No socket of the cgroup is load-balanced.
pub const ALL: u32 = 1;
/// No UDP socket of the cgroup is load-balanced.
pub const UDP_ONLY: u32 = 2;
