//! The programs that packets from outside meet first, alone: at the uplink, by the number of frontends, and in the driver.
//! Invariant: the program of a proxy that runs, with its tables.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4},
    path::Path,
};

use ::tests::{
    TIMEOUT,
    ingress_cluster::{IngressCluster, IngressNode},
    manifest::Service,
    test_cluster::TARGET,
};
use anyhow::{Context as _, Result, bail, ensure};
use aya::{
    TestRun as _, TestRunOptions,
    maps::MapInfo,
    programs::{SchedClassifier, Xdp, XdpMode},
};
use aya_obj::programs::XdpAttachType;
use build_tools::command::status;
use fastrand::Rng;
use nix::net::if_::if_nametoindex;

use crate::{
    figures::{median, medians_in_order},
    kernel_figures::{linked_program, open_maps},
    outside_cluster::BenchCluster,
    outside_packets::{self, PAYLOAD},
};

/// Numbers of frontends.
const SIZES: [usize; 4] = [1, 100, 1_000, 10_000];
const ROUNDS: usize = 21;
/// How often the program runs in a round.
const RUNS: u32 = 100_000;
/// How many packets for random frontends, and in the driver, each in a run of its own: there a run leaves the packet wrapped.
const PACKETS: usize = 20_000;
/// What a program returns for a packet that goes on.
const NEXT: u32 = u32::MAX;
const XDP_PASS: u32 = 2;
const XDP_TX: u32 = 3;
/// An address that no frontend has.
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 99);

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

/// CPU times in nanoseconds of a packet that is forwarded in the driver.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DriverFigures {
    /// The program alone, which decides, wraps and finds the route.
    pub(crate) program: f64,
    /// The node that a packet enters by, with veth as its driver: that copies each packet.
    pub(crate) veth: f64,
}

/// Measures the programs of an uplink, for each number of frontends.
pub(crate) fn measure(binary: &Path) -> Result<Vec<ProgramFigures>> {
    SIZES.iter().map(|it| of_size(binary, *it)).collect()
}

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
    let (arrives, leaves) = (uplink_program(node, "ingress")?, uplink_program(node, "egress")?);

    let elsewhere = packet(SocketAddrV4::new(ELSEWHERE, TARGET), 1);
    let mut arp = elsewhere.clone();
    arp[12..14].copy_from_slice(&[8, 6]);
    let other = repeated(&arrives, &arp)?;
    let passes = repeated(&arrives, &elsewhere)?;
    let hot = repeated(&arrives, &packet(frontend(0), 1))?;
    let mut rng = Rng::with_seed(1);
    let [random, start] = medians_in_order(PACKETS, |which| match which {
        0 => run(&arrives, &packet(frontend(rng.usize(..frontends)), rng.u16(..)), 1),
        _ => run(&arrives, &elsewhere, 1),
    })?;
    let tables = table_memory(node.agent.as_ref().context("it runs")?.pid())?;
    let memory = |name: &str| {
        // The name ends with the side.
        let tables = tables.iter().filter(|it| it.0.rsplit_once('_').is_some_and(|it| it.0 == name));
        tables.map(|it| it.1).reduce(|a, b| [a[0] + b[0], a[1] + b[1]])
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

/// The tables of a proxy: the name of each, its bytes, and the bytes of an entry.
fn table_memory(proxy: u32) -> Result<Vec<(String, [f64; 2])>> {
    let table = |(id, bytes): (u32, u64)| {
        let info = MapInfo::from_id(id)?;
        let (bytes, entries) = (bytes as f64, f64::from(info.max_entries()));
        Ok((info.name_as_str().unwrap_or_default().to_owned(), [bytes, bytes / entries]))
    };
    open_maps(proxy)?.into_iter().map(table).collect()
}

/// A program that is attached to the uplink.
fn uplink_program(node: &IngressNode, name: &'static str) -> Result<SchedClassifier> {
    let links = node.links(name);
    let link = links.first().context("no uplink has a program")?;
    Ok(SchedClassifier::from_program_info(linked_program(link)?, name.into())?)
}

/// Has the first node forward in the driver, and measures that.
pub(crate) fn measure_driver(bench: &mut BenchCluster, binary: &Path) -> Result<DriverFigures> {
    bench.cluster.nodes[0].agent.take().context("it runs")?.kill9()?;
    bench.cluster.start_binary(binary, 0, &["--external-forwarding-xdp=true"]);
    let agent = bench.cluster.nodes[0].agent.as_mut().context("it runs")?;
    agent.wait_until_logged(TIMEOUT, "packets from outside are forwarded in the driver")?;
    bench.wait_until_forwarded();
    let program = run_driver_program(bench)?;
    // The driver veth sends frames back only to an interface with a program: this one passes everything.
    let mut at_the_other_end = driver_program(bench)?;
    bench.cluster.lan.run(|| at_the_other_end.attach("n1", XdpMode::Driver))?;
    Ok(DriverFigures { program, veth: outside_packets::forwarded(bench)? })
}

/// The program at the interface of the first node.
fn driver_program(bench: &BenchCluster) -> Result<Xdp> {
    let links = bench.cluster.nodes[0].links("ingress_xdp_");
    let link = links.first().context("nothing is forwarded in the driver")?;
    Ok(Xdp::from_program_info(linked_program(link)?, "ingress_xdp".into(), XdpAttachType::Interface)?)
}

/// The run time for a packet that is sent on, less what it takes to start a run.
fn run_driver_program(bench: &BenchCluster) -> Result<f64> {
    let program = driver_program(bench)?;
    let SocketAddr::V4(sink) = bench.sink else { bail!("the address is of IPv4") };
    let elsewhere = datagram(SocketAddrV4::new(ELSEWHERE, 9), 1);
    bench.cluster.nodes[0].netns.run(|| {
        let interface = if_nametoindex("eth0")?;
        let run = |packet: &[u8], expect: u32| -> Result<f64> {
            // `struct xdp_md`: data, its end, metadata, interface, queue, and the interface that it leaves by.
            let context = [0, packet.len() as u32, 0, interface, 0, 0].map(u32::to_ne_bytes).concat();
            let options =
                TestRunOptions { data_in: Some(packet), ctx_in: Some(&context), ..TestRunOptions::new() };
            let result = program.test_run(options)?;
            ensure!(result.return_value == expect, "the program returns {}", result.return_value);
            Ok(result.duration.as_nanos() as f64)
        };
        let mut ports = 0..;
        let [sent, passed] = medians_in_order(PACKETS, |which| match which {
            0 => run(&datagram(sink, ports.next().unwrap_or_default()), XDP_TX),
            _ => run(&elsewhere, XDP_PASS),
        })?;
        Ok(sent - passed)
    })
}

/// A packet of a client in an Ethernet frame.
fn frame(protocol: u8, to: Ipv4Addr, payload: &[u8]) -> Vec<u8> {
    let ethernet: [u8; 14] = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
    let [high, low] = (20 + payload.len() as u16).to_be_bytes();
    let ip = [0x45, 0, high, low, 0, 0, 0x40, 0, 64, protocol, 0, 0, 198, 18, 0, 100];
    [&ethernet[..], &ip, &to.octets(), payload].concat()
}

/// A TCP packet of a connection that exists.
fn packet(to: SocketAddrV4, source_port: u16) -> Vec<u8> {
    let ports = [source_port, to.port()].map(u16::to_be_bytes).concat();
    let tcp = [&ports[..], &[0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]].concat();
    frame(6, *to.ip(), &tcp)
}

/// A datagram like those that are sent.
fn datagram(to: SocketAddrV4, source_port: u16) -> Vec<u8> {
    let udp = [source_port, to.port(), 8 + PAYLOAD.len() as u16, 0].map(u16::to_be_bytes).concat();
    frame(17, *to.ip(), &[&udp[..], &PAYLOAD].concat())
}
