//! The harness for end-to-end tests, benchmarks and the demo: real processes, real sockets, the real kernel.
//!
//! Nothing outside a sandbox is changed, and nothing is left behind.
//!
//! A test that needs the kernel enters a [`TestNode`] (a [`Sandbox`] with a child cgroup and a pin folder, and a network
//! namespace), starts [`EchoServer`]s at the endpoints' addresses, writes [`manifest`]s, starts the proxy, and then
//! connects: once ([`request`]), over one long-lived connection ([`EchoConnection`]), or continuously ([`ConnectLoad`]).
//! Tests of forwarded traffic use a [`TestCluster`] of several network namespaces.
//!
//! A function without a `Result` panics if the test cannot go on; one whose name ends with `or_skip` reports why the test is
//! skipped, and returns nothing to test with. An error says what failed, and why.

#![forbid(unsafe_code)]

pub mod agent;
pub mod background;
pub mod black_hole;
pub mod client;
pub mod deploy;
pub mod echo;
pub mod explain;
pub mod fixtures;
pub mod http;
pub mod ingress_cluster;
pub mod kernel_objects;
pub mod load;
pub mod manifest;
pub mod memory;
pub mod netns;
pub mod nft_versions;
pub mod pod;
pub mod requirements;
pub mod sandbox;
pub mod skip;
pub mod talk;
pub mod test_cluster;
pub mod test_node;
pub mod trace;

pub use self::http::metric;
pub use agent::{APPLIED, Agent, AgentCommand, Build, Output, VERBOSE, brain_socket, run, status_socket};
pub use background::Background;
pub use black_hole::BlackHole;
pub use client::{
    EchoConnection, REQUEST_TIMEOUT, Transport, connect_error, connected_udp_socket, exchange,
    exchange_connected, request, reset_on_close, udp_socket, udp_socket_at,
};
pub use echo::EchoServer;
pub use explain::Explained;
pub use fixtures::{FRONTEND, TARGET_PORT, WEB, WEB4, WEB6, endpoint, web, web_frontends, web4};
pub use ingress_cluster::{IngressCluster, OUTSIDE_CLIENTS};
pub use kernel_objects::{ObjectKind, ObjectTracker};
pub use load::{ConnectLoad, LoadReport};
pub use manifest::Service;
pub use memory::MemoryCgroup;
pub use netns::NetNs;
pub use pod::{Attack, Pod};
pub use requirements::{Host, kernel_at_least, program_or_skip, requirements};
pub use sandbox::{Sandbox, move_to};
pub use skip::skip;
pub use talk::Talk;
pub use test_cluster::TestCluster;
pub use test_node::{NODE, TestNode, expected_dump, pod_with_servers};
pub use trace::Trace;

use std::{
    collections::BTreeMap,
    env,
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

/// How long tests wait for an expected event before they fail: only a hang takes as long.
pub const TIMEOUT: Duration = Duration::from_secs(120);

pub use build_tools::TIMEOUT_FACTOR;

/// A limit of time, multiplied by [`TIMEOUT_FACTOR`].
pub fn scaled(limit: Duration) -> Duration {
    static FACTOR: OnceLock<f64> = OnceLock::new();
    let factor = || env::var(TIMEOUT_FACTOR).ok().and_then(|it| it.parse().ok()).unwrap_or(1.0);
    limit.mul_f64(*FACTOR.get_or_init(factor))
}

#[track_caller]
pub fn assert_contains(text: &str, parts: &[&str]) {
    for it in parts {
        assert!(text.contains(it), "{it:?} is not in\n{text}");
    }
}

pub fn count_each<T: Ord>(items: impl IntoIterator<Item = T>) -> BTreeMap<T, usize> {
    let mut counts = BTreeMap::new();
    for it in items {
        *counts.entry(it).or_default() += 1;
    }
    counts
}

/// Whether the machine is emulated, and repetitions are too slow there.
pub fn is_slow_machine() -> bool {
    repetition_divisor() > 1
}

/// The environment variable with the divisor of every number of repetitions on a slow machine.
pub const REPETITION_DIVISOR: &str = "KUBE_PROXY_EBPF_TEST_REPETITION_DIVISOR";

/// A number of repetitions, divided by [`REPETITION_DIVISOR`], but at least three.
pub fn repetitions(times: usize) -> usize {
    (times / repetition_divisor()).max(3)
}

fn repetition_divisor() -> usize {
    env::var(REPETITION_DIVISOR).ok().and_then(|it| it.parse().ok()).unwrap_or(1).max(1)
}

/// Polls until `condition` holds; `false` if it does not within `limit` (scaled). Half of the time it sleeps, so that a
/// condition that starts a program leaves the processor to what it waits for.
pub fn eventually(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let limit = scaled(limit);
    let started = Instant::now();
    loop {
        let asked = Instant::now();
        if condition() {
            return true;
        }
        if started.elapsed() > limit {
            return false;
        }
        thread::sleep(asked.elapsed().max(Duration::from_millis(2)));
    }
}
