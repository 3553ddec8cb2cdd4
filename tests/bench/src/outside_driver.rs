//! Packets from outside that are forwarded in the driver.
//! Invariant: the program of a proxy that runs, with its tables, at the interface of a node.

use std::{
    net::{IpAddr, SocketAddrV4},
    path::Path,
};

use ::tests::TIMEOUT;
use anyhow::{Context as _, Result, ensure};
use aya::{
    TestRun as _, TestRunOptions,
    programs::{Xdp, XdpMode},
};
use aya_obj::programs::XdpAttachType;
use nix::net::if_::if_nametoindex;

use crate::{
    figures::median,
    outside_cluster::BenchCluster,
    outside_packets::{self, PAYLOAD, frame},
    program_stats::linked_program,
};

/// How many packets, each in a run of its own: a run leaves the packet wrapped.
const RUNS: usize = 20_000;
const XDP_PASS: u32 = 2;
const XDP_TX: u32 = 3;

/// CPU times of a packet in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DriverFigures {
    /// The program alone, which decides, wraps and finds the route.
    pub(crate) program: f64,
    /// The node that a packet enters by, with veth as its driver: that copies each packet.
    pub(crate) veth: f64,
}

/// Has the first node forward in the driver, and measures that.
pub(crate) fn measure(bench: &mut BenchCluster, binary: &Path) -> Result<DriverFigures> {
    bench.cluster.nodes[0].agent.take().context("it runs")?.kill9()?;
    bench.cluster.start_binary(binary, 0, &["--external-forwarding-xdp=true"]);
    let agent = bench.cluster.nodes[0].agent.as_mut().context("it runs")?;
    agent.wait_until_logged(TIMEOUT, "packets from outside are forwarded in the driver")?;
    bench.wait_until_forwarded();
    let program = program(bench)?;
    let _at_the_other_end = attach(bench)?;
    Ok(DriverFigures { program, veth: outside_packets::forwarded(bench)? })
}

/// The program at the interface of the first node.
fn xdp(bench: &BenchCluster) -> Result<Xdp> {
    let links = bench.cluster.nodes[0].links("ingress_xdp_");
    let link = links.first().context("nothing is forwarded in the driver")?;
    Ok(Xdp::from_program_info(linked_program(link)?, "ingress_xdp".into(), XdpAttachType::Interface)?)
}

/// Attaches it at the other end of the node's cable, where it passes everything: the driver veth sends frames back only to an
/// interface with a program.
fn attach(bench: &BenchCluster) -> Result<Xdp> {
    let mut program = xdp(bench)?;
    bench.cluster.lan.run(|| program.attach("n1", XdpMode::Driver))?;
    Ok(program)
}

/// The run time for a packet that is sent on, less what it takes to start a run.
fn program(bench: &BenchCluster) -> Result<f64> {
    let program = xdp(bench)?;
    let IpAddr::V4(sink) = bench.sink.ip() else { anyhow::bail!("the address is of IPv4") };
    let elsewhere = datagram(SocketAddrV4::new([10, 244, 1, 99].into(), 9), 1);
    bench.cluster.nodes[0].netns.run(|| {
        let interface = if_nametoindex("eth0")?;
        let mut times = [const { Vec::new() }; 2];
        for port in 0..RUNS as u16 {
            let packet = datagram(SocketAddrV4::new(sink, bench.sink.port()), port);
            for (times, (packet, expect)) in times.iter_mut().zip([(&packet, XDP_TX), (&elsewhere, XDP_PASS)])
            {
                // `struct xdp_md`: data, its end, metadata, interface, queue, and the interface that it leaves by.
                let context = [0, packet.len() as u32, 0, interface, 0, 0].map(u32::to_ne_bytes).concat();
                let options =
                    TestRunOptions { data_in: Some(packet), ctx_in: Some(&context), ..TestRunOptions::new() };
                let result = program.test_run(options)?;
                ensure!(result.return_value == expect, "the program returns {}", result.return_value);
                times.push(result.duration.as_nanos() as f64);
            }
        }
        let [sent, passed] = times.map(median);
        Ok(sent - passed)
    })
}

/// A datagram in an Ethernet frame, as those that are sent.
fn datagram(to: SocketAddrV4, source_port: u16) -> Vec<u8> {
    let udp = [source_port, to.port(), 8 + PAYLOAD.len() as u16, 0].map(u16::to_be_bytes).concat();
    frame(17, *to.ip(), &[&udp[..], &PAYLOAD].concat())
}
