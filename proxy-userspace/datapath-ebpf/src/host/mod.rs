//! Facts and calls of this kernel: capabilities, BTF, cgroups, the clock, bpf(2).
//!
//! May know: nothing of Services, tables or programs.

pub(crate) mod btf;
pub(crate) mod capabilities;
pub(crate) mod cgroup;
pub(crate) mod cgroup_paths;
pub(crate) mod clock;
pub(crate) mod failpoint;
pub(crate) mod grace_period;
pub(crate) mod raw_bpf;
