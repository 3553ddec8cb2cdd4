//! The machines that the product runs on.
//! The kernel object is the same for all of them.

use std::env;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;

/// A machine that the product runs on, by the names of `uname -m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Machine {
    #[value(name = "x86_64", alias = "amd64")]
    X86_64,
    #[value(name = "aarch64", alias = "arm64")]
    Aarch64,
}

impl Machine {
    pub const ALL: [Self; 2] = [Self::X86_64, Self::Aarch64];

    /// This machine; an error on one that the product does not run on.
    pub fn own() -> Result<Self> {
        ensure!(
            cfg!(target_endian = "little"),
            "kube-proxy-ebpf does not support big-endian machines such as {}: its kernel object is little-endian",
            env::consts::ARCH
        );
        let own = Self::ALL.into_iter().find(|it| it.name() == env::consts::ARCH);
        own.with_context(|| {
            format!("kube-proxy-ebpf does not support {}, only x86_64 and aarch64", env::consts::ARCH)
        })
    }

    /// The name of `uname -m`.
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    /// The name that Debian, Kubernetes and container images have for it.
    pub fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }

    /// The compiler's name of its target.
    pub fn target(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64-unknown-linux-gnu",
            Self::Aarch64 => "aarch64-unknown-linux-gnu",
        }
    }
}
