//! The program that packets from outside meet first, alone, by the number of frontends.
//! Invariant: the program of a proxy that runs, with its tables.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4},
    path::Path,
};

use ::tests::{
    ingress_cluster::{IngressCluster, IngressNode},
    manifest::Service,
    test_cluster::TARGET,
};
use anyhow::{Context as _, Result, ensure};
use aya::{TestRun as _, TestRunOptions, maps::MapInfo, programs::SchedClassifier};
use build_tools::command::status;
use fastrand::Rng;

use crate::{figures::median, map_memory::open_maps, outside_packets::frame, program_stats::linked_program};

/// Numbers of frontends.
const SIZES: [usize; 4] = [1, 100, 1_000, 10_000];
const ROUNDS: usize = 21;
/// How often the program runs in a round.
const RUNS: u32 = 100_000;
/// How many packets for random frontends, each in a run of its own.
const PACKETS: usize = 20_000;
/// What a program returns for a packet that goes on.
const NEXT: u32 = u32::MAX;

/// Run times in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProgramFigures {
    pub(crate) frontends: usize,
    /// A frame that is not IP: what a run costs.
    pub(crate) other: f64,
    /// A packet to an address that is no frontend.
    pub(crate) passes: f64,
    /// Packets to the same frontend.
    pub(crate) hot: f64,
    /// Packets to random frontends.
    pub(crate) random: f64,
    /// A packet of something else that leaves, in the program for those.
    pub(crate) leaves: f64,
    /// The memory of the frontends' tables in bytes, that of both generations.
    pub(crate) memory: f64,
    /// The memory of a row, of both generations.
    pub(crate) row_memory: f64,
}

/// Measures them, for each number of frontends.
pub(crate) fn measure(binary: &Path) -> Result<Vec<ProgramFigures>> {
    SIZES.iter().map(|it| of_size(binary, *it)).collect()
}

/// The address of a frontend.
fn frontend(n: usize) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::from(0x0a80_0000 + n as u32), 80)
}

fn of_size(binary: &Path, frontends: usize) -> Result<ProgramFigures> {
    status("Measuring", &format!("the program of {frontends} frontends"));
    let mut cluster = IngressCluster::new("bench-program", 1)?;
    let node = &cluster.nodes[0];
    let (name, pod) = (node.name(), [node.pod_addresses()[0]]);
    let service = |n: usize| {
        Service::new(&format!("s{n}"), &[Ipv4Addr::from(0x0a60_0000 + n as u32).into()])
            .load_balancer_ips(&[IpAddr::V4(*frontend(n).ip())])
            .annotation("kube-proxy-ebpf.io/external-forwarding", "dsr")
            .port("", "TCP", 80, TARGET)
            .endpoint_on(&name, &format!("p{n}"), &pod)
    };
    cluster.write(&(0..frontends).map(service).collect::<Vec<_>>());
    // All Services are in one namespace.
    cluster.start_binary(binary, 0, &["--max-namespace-entries=1000000"]);
    cluster.wait_until_applied();
    cluster.wait_until_forwarded(SocketAddr::V4(frontend(frontends - 1)), &[(0, 1)]);
    cluster.wait_until_settled();
    let node = &cluster.nodes[0];
    let (arrives, leaves) = (program(node, "ingress")?, program(node, "egress")?);

    let elsewhere = packet(SocketAddrV4::new(Ipv4Addr::new(10, 244, 1, 99), TARGET), 1);
    let mut arp = elsewhere.clone();
    arp[12..14].copy_from_slice(&[8, 6]);
    let other = repeated(&arrives, &arp)?;
    let passes = repeated(&arrives, &elsewhere)?;
    let hot = repeated(&arrives, &packet(frontend(0), 1))?;
    let mut rng = Rng::with_seed(1);
    let mut times = [const { Vec::new() }; 2];
    for _ in 0..PACKETS {
        let any = packet(frontend(rng.usize(..frontends)), rng.u16(..));
        times[0].push(run(&arrives, &any, 1)?);
        times[1].push(run(&arrives, &elsewhere, 1)?);
    }
    let [random, start] = times.map(median);
    let tables = table_memory(node.agent.as_ref().context("it runs")?.pid())?;
    let memory = |name: &str| {
        // The name ends with the side.
        let tables = tables.iter().filter(|it| it.name.rsplit_once('_').is_some_and(|it| it.0 == name));
        tables.map(|it| [it.bytes, it.bytes / it.entries]).reduce(|a, b| [a[0] + b[0], a[1] + b[1]])
    };
    Ok(ProgramFigures {
        frontends,
        other,
        passes,
        hot,
        random: random - (start - passes),
        leaves: repeated(&leaves, &elsewhere)?,
        memory: memory("forwards").context("no table of frontends")?[0],
        // An entry is a pair of rows.
        row_memory: memory("forward_rows").context("no table of rows")?[1] / 2.0,
    })
}

/// The run time of a program for a packet that goes on, the mean of so many runs.
fn run(program: &SchedClassifier, packet: &[u8], repeat: u32) -> Result<f64> {
    let options = TestRunOptions { data_in: Some(packet), repeat, ..TestRunOptions::new() };
    let result = program.test_run(options)?;
    ensure!(result.return_value == NEXT, "the program returns {}", result.return_value);
    Ok(result.duration.as_nanos() as f64)
}

fn repeated(program: &SchedClassifier, packet: &[u8]) -> Result<f64> {
    Ok(median((0..ROUNDS).map(|_| run(program, packet, RUNS)).collect::<Result<_>>()?))
}

/// A table of a proxy.
struct TableMemory {
    name: String,
    bytes: f64,
    entries: f64,
}

fn table_memory(proxy: u32) -> Result<Vec<TableMemory>> {
    let table = |(id, bytes): (u32, u64)| {
        let info = MapInfo::from_id(id)?;
        let name = info.name_as_str().unwrap_or_default().to_owned();
        Ok(TableMemory { name, bytes: bytes as f64, entries: info.max_entries().into() })
    };
    open_maps(proxy)?.into_iter().map(table).collect()
}

/// A program that is attached to the uplink.
fn program(node: &IngressNode, name: &'static str) -> Result<SchedClassifier> {
    let links = node.links(name);
    let link = links.first().context("no uplink has a program")?;
    Ok(SchedClassifier::from_program_info(linked_program(link)?, name.into())?)
}

/// A TCP packet of a connection that exists, in an Ethernet frame.
fn packet(to: SocketAddrV4, source_port: u16) -> Vec<u8> {
    let ports = [source_port, to.port()].map(u16::to_be_bytes).concat();
    let tcp = [&ports[..], &[0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]].concat();
    frame(6, *to.ip(), &tcp)
}
