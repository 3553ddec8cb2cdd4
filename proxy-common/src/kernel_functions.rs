//! The kernel functions (kfuncs) that programs call, besides its helpers.
//!
//! A helper has the same number in every kernel. A kernel function has its BTF id, which differs, so that programs are compiled
//! with a number that no helper has, and the loader puts the id in its place (<https://docs.kernel.org/bpf/kfuncs.html>).

/// Stands for `bpf_rdonly_cast` (Linux 6.2, a35b9af4ec2c).
pub const RDONLY_CAST: u32 = 0x6b66_0001;
