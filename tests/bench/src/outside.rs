//! `cargo xtask bench outside`: what it costs to forward packets from outside whole, beside the nftables path.
//! Invariant: what is compared takes turns, and is measured on one core.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use build_tools::{build, command::status};
use serde::Deserialize;

use crate::{
    example,
    figures::{Figures, medians_in_rotation},
    outside_cluster::{BenchCluster, NETWORKS, PORT},
    outside_packets::{self, pin_to_core},
    outside_program,
};

const CONNECTS: usize = 5_000;
/// Numbers of nodes with endpoints.
const NODES: [u32; 5] = [3, 10, 50, 200, 1_000];

/// The names of series, in nanoseconds by the number of frontends.
pub(crate) const PASSES: &str = "a packet of something else";
pub(crate) const HOT: &str = "always the same frontend";
pub(crate) const RANDOM: &str = "a random frontend";

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RowFigures {
    rows: u32,
    build_ms: f64,
    uneven: f64,
    moved_most: f64,
    moved_mean: f64,
}

pub(crate) fn bench() -> Result<Figures> {
    let binary = build::build(true)?;
    example::build("datapath-ebpf", "bench_rows")?;
    pin_to_core()?;

    let programs = outside_program::measure(&binary)?;
    let mut forwarding = BenchCluster::start(&binary, "dsr")?;
    let translating = BenchCluster::start(&binary, "nat")?;
    status("Measuring", "packets by the paths that they take");
    let packets = outside_packets::measure(&forwarding, &translating)?;
    status("Measuring", "connections from outside");
    let [direct, forwarded, translated] = connects(&forwarding, &translating)?;
    status("Measuring", "packets that are forwarded in the driver");
    let driver = outside_program::measure_driver(&mut forwarding, &binary)?;
    drop((forwarding, translating));
    let mut rows = Vec::new();
    for nodes in NODES {
        status("Measuring", &format!("the rows of {nodes} nodes"));
        rows.push((nodes, example::measure::<RowFigures>("bench_rows", &[nodes])?));
    }
    let rows_of_most = rows.last().context("they were measured")?.1.rows;

    let mut report = Figures::new("CASE");
    let ratio = packets.forwarded / packets.translated;
    report.row("node that a packet enters by: CPU, of that of the nftables path", 0.7, ratio, "x", 2);
    report.figure("  forwarded", packets.forwarded, "ns", 0);
    report.figure("  by the nftables path", packets.translated, "ns", 0);
    let in_driver = "the same in the driver (XDP), the program alone: of the nftables path";
    report.row(in_driver, 0.45, driver.program / packets.translated, "x", 2);
    report.figure("  the program", driver.program, "ns", 0);
    report.figure("  with veth as the driver, which copies each packet", driver.veth, "ns", 0);
    let ratio = packets.unwrapped / packets.served;
    let case = "node that serves a packet: CPU, of that of a packet that was not wrapped";
    report.row(case, 1.05, ratio, "x", 2);
    report.figure("  wrapped", packets.unwrapped, "ns", 0);
    report.figure("  not wrapped", packets.served, "ns", 0);
    let large = programs.last().context("they were measured")?;
    report.row("10k frontends: the decision for one frontend, in the program", 100.0, large.hot, "ns", 0);
    report.row("10k frontends: for a random frontend, in the program", 250.0, large.random, "ns", 0);
    let [passes, leaves] = [large.passes, large.leaves].map(|it| it - large.other);
    report.row("10k frontends: for a packet of something else, in the program", 15.0, passes, "ns", 0);
    report.row("  that leaves, in the program for those", 15.0, leaves, "ns", 0);
    let case = "  for a frame that is not IP: what a run costs, and the two rows above leave out";
    report.figure(case, large.other, "ns", 0);
    let case = "a TCP connection from outside: time, of that by the nftables path";
    report.row(case, 0.67, forwarded / translated, "x", 2);
    report.figure("  connections per second, forwarded", 1e9 / forwarded, "", 0);
    report.figure("  connections per second, by the nftables path", 1e9 / translated, "", 0);
    report.figure("  connections per second, straight to an endpoint", 1e9 / direct, "", 0);
    let memory = (large.memory + large.row_memory * f64::from(rows_of_most)) / 1e6;
    report.row("10k frontends with the same 1,000 nodes: kernel memory", 5.0, memory, "MB", 1);
    for (nodes, it) in &rows {
        report.row(&format!("{nodes} nodes: time to compute the rows"), 5.0, it.build_ms, "ms", 3);
        report.figure("  rows", it.rows.into(), "", 0);
        report.row("  a node that goes moves, of its share", 1.3, it.moved_mean, "x", 2);
        report.figure("  at most", it.moved_most, "x", 2);
        report.row("  shares differ by at most", 2.0, it.uneven * 100.0, "%", 1);
    }
    report.series(PASSES, programs.iter().map(|it| (it.frontends as f64, it.passes)).collect());
    report.series(HOT, programs.iter().map(|it| (it.frontends as f64, it.hot)).collect());
    report.series(RANDOM, programs.iter().map(|it| (it.frontends as f64, it.random)).collect());
    Ok(report.method(
        "IPv4, policy Cluster; client, router, bridge and nodes are network namespaces of one machine. Packets: UDP in frames of 60 \
         bytes, 1,000 flows, one direction. Their CPU time is that of the thread that sends them, and of the kernel's for what it \
         defers on that core, less that of packets which are dropped where they arrive at the node: what remains is the node's work \
         and one transmission. In the driver: BPF_PROG_TEST_RUN with the interface of a node, runs of one packet, less what it takes to \
         start such a run. A connection: connect() and close() of one client, over a router that spreads them over three nodes \
         with an endpoint each. The program alone: BPF_PROG_TEST_RUN, packets that the node serves itself; random frontends in runs \
         of one packet, less what it takes to start such a run. Memory: of the tables of 10,000 frontends, and of as many rows as \
         1,000 nodes have, both generations. Rows: one endpoint per node; nodes that go one at a time.",
    ))
}

/// The median times of connections: straight to an endpoint, forwarded, and by the nftables path.
fn connects(forwarding: &BenchCluster, translating: &BenchCluster) -> Result<[f64; 3]> {
    forwarding.cluster.set_next_hops(NETWORKS, &[0, 1, 2]);
    translating.cluster.set_next_hops(NETWORKS, &[0, 1, 2]);
    forwarding.cluster.set_next_hops(["10.244.2.0/24", "fd00:244:2::/64"], &[1]);
    let endpoint = SocketAddr::new(forwarding.cluster.nodes[1].pod_addresses()[0], PORT);
    let ways = [(forwarding, endpoint), (forwarding, forwarding.address), (translating, translating.address)];
    medians_in_rotation(CONNECTS, |which| {
        let (bench, address) = ways[which];
        bench.cluster.clients[0].run(|| bench.connect_and_close(address))
    })
}
