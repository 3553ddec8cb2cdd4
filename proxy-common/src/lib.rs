//! What the kernel side and user space share: the layout of every map, and the decisions made from them.
//!
//! Invariant: map keys and values consist of fixed-width integers and arrays of them, without implicit padding, and their
//! sizes are asserted beside them.
//! Everything here compiles for the BPF target and for the host, so that `cargo test` runs what the kernel runs.

#![cfg_attr(not(any(test, feature = "user")), no_std)]
#![forbid(unsafe_code)]

pub mod affinity;
pub mod choice;
pub mod counters;
pub mod decide;
pub mod exclusion;
pub mod forward;
pub mod health;
pub mod kernel_functions;
pub mod net;
pub mod overflow;
pub mod probe;
pub mod random;
pub mod senders;
pub mod sock_nat;
pub mod tables;
pub mod trace;
pub mod udp_nat;

/// The layout version of [`tables`]: part of the path the generation maps are pinned under.
/// Raise it with every change of a size, a field, a meaning or a pinned name; a new binary then builds its maps beside the
/// old ones.
pub const LAYOUT_VERSION: u32 = if cfg!(feature = "next-layout") { 1012 } else { 12 };

/// The layout version of [`sock_nat`], [`overflow`] and [`senders`], separate from [`LAYOUT_VERSION`] because live sockets outlast an
/// upgrade: with another version they lose their translation.
pub const SOCK_NAT_VERSION: u32 = 4;

/// The layout version of [`affinity`], separate from [`LAYOUT_VERSION`] so that clients keep their backends.
pub const AFFINITY_VERSION: u32 = 2;

/// The layout version of [`counters`], separate from [`LAYOUT_VERSION`] so that counts outlast an upgrade.
pub const COUNTERS_VERSION: u32 = 2;

/// The layout version of [`health`], separate from [`LAYOUT_VERSION`] so that ejected endpoints stay ejected.
pub const HEALTH_VERSION: u32 = 2;
