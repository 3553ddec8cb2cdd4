//! The sandbox in which kube-proxy-ebpf is tested and shown: real processes, real sockets, the real kernel.
//! The one rule: nothing outside the sandbox is touched, and nothing of it stays.
//!
//! A test that needs the kernel opens a [`Sandbox`] (a child cgroup and a folder for pins) and a [`NetNs`], puts
//! [`EchoServer`]s at the endpoints' addresses, writes [`manifest`]s, starts an [`Agent`], and then connects: once
//! ([`request`]), over one lasting connection ([`EchoConnection`]), or without pause ([`ConnectLoad`]).

#![forbid(unsafe_code)]

pub mod agent;
pub mod client;
pub mod deploy;
pub mod echo;
pub mod http;
pub mod load;
pub mod manifest;
pub mod netns;
pub mod program_stats;
pub mod requirements;
pub mod sandbox;
pub mod test_cluster;
pub mod test_node;

pub use agent::Agent;
pub use client::{EchoConnection, Transport, connect_error, request};
pub use echo::EchoServer;
pub use load::ConnectLoad;
pub use netns::NetNs;
pub use requirements::{Host, requirements};
pub use sandbox::Sandbox;
pub use test_cluster::TestCluster;
pub use test_node::{Build, TestNode};

use std::{
    env,
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

/// Names the number by which every limit is multiplied where everything is slow: in an emulated machine.
pub const TIMEOUT_FACTOR: &str = "KUBE_PROXY_EBPF_TEST_TIMEOUT_FACTOR";

/// How long something may really take that may take this long on an ordinary machine.
#[must_use]
pub fn scaled(limit: Duration) -> Duration {
    static FACTOR: OnceLock<u32> = OnceLock::new();
    let factor = || env::var(TIMEOUT_FACTOR).ok().and_then(|it| it.parse().ok()).unwrap_or(1);
    limit * *FACTOR.get_or_init(factor)
}

/// Names the number by which repetitions are divided where everything is slow.
pub const REPETITION_DIVISOR: &str = "KUBE_PROXY_EBPF_TEST_REPETITION_DIVISOR";

/// How often something is really done that is done this often on an ordinary machine: three times at the least.
#[must_use]
pub fn repetitions(times: usize) -> usize {
    let divisor = env::var(REPETITION_DIVISOR).ok().and_then(|it| it.parse().ok()).unwrap_or(1);
    times.checked_div(divisor).unwrap_or(times).max(3)
}

/// Waits until `condition` holds and says whether it did within `limit`.
pub fn eventually(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let limit = scaled(limit);
    let started = Instant::now();
    while !condition() {
        if started.elapsed() > limit {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
    true
}
