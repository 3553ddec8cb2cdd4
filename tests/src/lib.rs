//! The sandbox in which kube-proxy-ebpf is tested and shown: real processes, real sockets, the real kernel.
//! The one rule: nothing outside the sandbox is touched, and nothing of it stays.
//!
//! A test that needs the kernel opens a [`Sandbox`] (a child cgroup and a folder for pins) and a [`NetNs`], puts
//! [`EchoServer`]s at the endpoints' addresses, writes [`manifest`]s, starts an [`Agent`], and then connects: once
//! ([`ask`]), over one lasting connection ([`Probe`]), or without pause ([`Load`]).

#![forbid(unsafe_code)]

pub mod agent;
pub mod client;
pub mod cluster;
pub mod cost;
pub mod deploy;
pub mod echo;
pub mod http;
pub mod load;
pub mod manifest;
pub mod netns;
pub mod requirements;
pub mod sandbox;
pub mod world;

pub use agent::Agent;
pub use client::{Probe, Transport, ask, refusal};
pub use cluster::Cluster;
pub use echo::EchoServer;
pub use load::Load;
pub use netns::NetNs;
pub use requirements::{Machine, requirements};
pub use sandbox::Sandbox;
pub use world::{Build, World};

use std::{
    env,
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

/// Names the number by which every limit is multiplied where everything is slow: in an emulated machine.
pub const PATIENCE: &str = "KUBE_PROXY_EBPF_TEST_PATIENCE";

/// How long something may really take that may take this long on an ordinary machine.
#[must_use]
pub fn patiently(limit: Duration) -> Duration {
    static FACTOR: OnceLock<u32> = OnceLock::new();
    let factor = || env::var(PATIENCE).ok().and_then(|it| it.parse().ok()).unwrap_or(1);
    limit * *FACTOR.get_or_init(factor)
}

/// Names the number by which repetitions are divided where everything is slow.
pub const HURRY: &str = "KUBE_PROXY_EBPF_TEST_HURRY";

/// How often something is really done that is done this often on an ordinary machine: three times at the least.
#[must_use]
pub fn repetitions(times: usize) -> usize {
    let divisor = env::var(HURRY).ok().and_then(|it| it.parse().ok()).unwrap_or(1);
    times.checked_div(divisor).unwrap_or(times).max(3)
}

/// Waits until `condition` holds and says whether it did within `limit`.
pub fn eventually(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let limit = patiently(limit);
    let started = Instant::now();
    while !condition() {
        if started.elapsed() > limit {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
    true
}
