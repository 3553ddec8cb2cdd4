//! What must hold for any bytes: for a file, for a message, for the history of a cluster.
//!
//! The one rule: a target is a plain function that panics if something does not hold.
//! libFuzzer calls it (`cargo xtask fuzz`), and so does a test, with a corpus and a fixed number of mutations of it.

#![forbid(unsafe_code)]

pub mod brain;
pub mod facts;
pub mod laws;
pub mod mutate;
pub mod parser;
pub mod wire;

/// A target by its name, which is that of its corpus, too.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 4] =
    [("parser", parser::target), ("wire", wire::target), ("facts", facts::target), ("brain", brain::target)];
