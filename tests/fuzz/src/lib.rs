//! Invariants for arbitrary input: of everything that reads what others have written.
//!
//! A target is a function that panics if an invariant is violated. libFuzzer calls it (`cargo xtask fuzz`), and so does a
//! test, with a corpus and a fixed number of mutations of it.

#![forbid(unsafe_code)]

pub mod brain;
pub mod compile;
pub mod explanations;
pub mod invariants;
pub mod random_cluster;
pub mod targets;
pub mod wire;
