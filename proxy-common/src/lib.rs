//! What the kernel side and user space share: the layout of every map, and the decisions made from them.
//!
//! The one rule: whatever a map holds is made of fixed-width integers and arrays of them, without implicit padding, and
//! its size is asserted beside it.
//! Everything here compiles for the kernel's machine and for the host, so that `cargo test` runs what the kernel runs.

#![cfg_attr(not(any(test, feature = "user")), no_std)]
#![forbid(unsafe_code)]

pub mod affinity;
pub mod canary;
pub mod counters;
pub mod decide;
pub mod net;
pub mod peers;
pub mod scope;
pub mod socket;
pub mod tables;

/// The version of everything in [`tables`]: part of the path the generation maps are pinned under.
/// Raise it with every change of a size, a field or a meaning there; a new binary then builds its maps beside the old.
pub const LAYOUT_VERSION: u32 = if cfg!(feature = "next-layout") { 1004 } else { 4 };

/// The version of everything in [`socket`] and [`peers`], apart from [`LAYOUT_VERSION`], because live sockets outlast an upgrade.
/// It should never change: socket storage grows into its reserved words, which older programs leave zero.
pub const SOCKETS_VERSION: u32 = 1;

/// The version of everything in [`affinity`], apart from [`LAYOUT_VERSION`], so that clients keep their backends.
pub const AFFINITY_VERSION: u32 = 1;

/// The version of everything in [`counters`], apart from [`LAYOUT_VERSION`], so that what was counted stays.
pub const COUNTERS_VERSION: u32 = 1;
