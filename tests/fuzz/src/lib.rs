//! Invariants for arbitrary input: of everything that reads what others have written.
//!
//! A target is a function that panics if an invariant is violated. libFuzzer calls it (`cargo xtask fuzz`), and so does a
//! test, with a corpus and a fixed number of mutations of it.

#![forbid(unsafe_code)]

pub mod api_list;
pub mod api_watch;
pub mod brain;
pub mod certificates;
pub mod change_sets;
pub mod cluster;
pub mod compile;
pub mod config;
pub mod explanations;
pub mod invariants;
pub mod maps;
pub mod mutate;
pub mod netlink;
pub mod nft_tables;
pub mod pages;
pub mod parser;
pub mod random_cluster;
pub mod wire;
