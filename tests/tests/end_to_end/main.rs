//! The end-to-end tests: real processes, real sockets, the real kernel.
//! Invariant: each test runs in a process of its own (`cargo xtask test`), since a process is in one cgroup.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod affinity;
mod backend_conformance;
mod bad_input;
mod capabilities;
mod check;
mod counters;
mod exclusion;
mod explain;
mod flip;
mod harness;
mod held_connections;
mod hook_probe;
mod hostile_pods;
mod kube;
mod kube_proxy_rules;
mod large_reports;
mod load_balancing;
mod logs;
mod memory_bounds;
mod node_ports;
mod outside;
mod outside_peers;
mod outside_reports;
mod outside_story;
mod outside_throughput;
mod outside_uplinks;
mod packet_path;
mod passive_health;
mod passthrough;
mod pod_annotations;
mod protocols;
mod reports;
mod restart;
mod scenarios;
mod several_brains;
mod socket_slots;
mod socket_termination;
mod sockets;
mod standalone_backends;
mod support_bundle;
mod top;
mod trace;
mod trace_ends;
mod trace_steps;
mod two_processes;
mod unconnected_udp;
mod upgrade;

/// The process of a [`tests::Pod`], which every test of this binary can start.
#[test]
#[ignore = "it is not a test, but the process of a hostile pod"]
fn hostile_process() {
    tests::pod::attack();
}
