//! The builds of kube-proxy-ebpf that a test can start.

use std::{env, path::PathBuf};

/// A build; `cargo xtask test` makes them and names their paths in the environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    /// What a node runs.
    Product,
    /// Can be stopped at named steps (feature `fault-points`).
    FaultPoints,
    /// The same, with another layout of the maps (feature `next-layout`).
    NextLayout,
}

impl Binary {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Product, Self::FaultPoints, Self::NextLayout];

    /// The environment variable that holds its path.
    #[must_use]
    pub fn variable(self) -> &'static str {
        match self {
            Self::Product => "KUBE_PROXY_EBPF",
            Self::FaultPoints => "KUBE_PROXY_EBPF_FAULT_POINTS",
            Self::NextLayout => "KUBE_PROXY_EBPF_NEXT_LAYOUT",
        }
    }

    /// Its path, or why the test that wants it is skipped.
    #[must_use]
    pub fn or_skip(self, test: &str) -> Option<PathBuf> {
        let path = env::var_os(self.variable()).map(PathBuf::from);
        if path.is_none() {
            crate::sandbox::skip(
                test,
                &format!("{} is not set: run it by `cargo xtask test`", self.variable()),
            );
        }
        path
    }
}
