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
    thread,
    time::{Duration, Instant},
};

/// Waits until `condition` holds and says whether it did within `limit`.
pub fn eventually(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    while !condition() {
        if started.elapsed() > limit {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
    true
}
