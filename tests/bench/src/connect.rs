//! `cargo xtask bench connect`: the cost of connecting to a Service's address.
//! Invariant: a figure is a ratio of pairs, both sides of which other load affects, or the kernel's run time of a program.

use std::{
    io::{BufRead as _, BufReader},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use build_tools::{
    build,
    command::{KilledOnDrop, status},
};
use fastrand::Rng;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use socket2::{Domain, Socket, Type};
use tests::{
    MemoryCgroup, Sandbox, TestNode,
    agent::{self, AgentCommand},
    client::reset_on_close,
    manifest::Service,
    test_node::NODE,
};

use crate::{
    figures::{Figures, medians_in_rotation},
    kernel_figures::run_time,
};

/// Numbers of Services.
const SIZES: [usize; 4] = [100, 1_000, 10_000, 50_000];
const PAIRS: usize = 20_000;
/// Connects, or sockets, of one batch of runs of a program.
const CONNECTS: usize = 1_000;
const DATAGRAM_SOCKETS: usize = 10_000;
const ENDPOINTS: u32 = 10;
const PORT: u16 = 8080;

/// The names of series, in nanoseconds by the number of Services.
pub(crate) const DIRECT: &str = "straight to an endpoint";
pub(crate) const ONE: &str = "through one Service";
pub(crate) const ANY: &str = "through a random Service";
pub(crate) const PROGRAM_MISS: &str = "program: to no Service";
pub(crate) const PROGRAM_HIT: &str = "program: to one Service";
pub(crate) const PROGRAM_ANY: &str = "program: to a random Service";

/// The figures at a number of Services, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct ConnectFigures {
    /// The median of connect and close, to an endpoint.
    direct: f64,
    /// To the address of one Service, every time.
    one: f64,
    /// To the address of a Service without passive health.
    unwatched: f64,
    /// To the address of a random Service.
    any: f64,
    /// The run time of the connect program, for one Service every time.
    hit: f64,
    /// For a random Service.
    any_hit: f64,
    /// For an address of no Service.
    miss: f64,
    /// The run time of the program that closes sockets.
    close: f64,
    /// The run time of the program that watches connections, for both ends of one that is not translated.
    passing: f64,
    /// What it takes longer to open a UDP socket, send one datagram and close it, to a Service than to an endpoint.
    datagram: f64,
    /// As `hit`, of the program of a trace.
    traced: f64,
    traced_steps: f64,
    /// The bytes that an open UDP socket that has sent to a Service charges to the proxy.
    memory: f64,
}

pub(crate) fn bench() -> Result<Figures> {
    let binary = build::build(true)?;
    let mut sizes = Vec::new();
    for services in SIZES {
        sizes.push((services, measure(&binary, services)?));
    }
    let of = |services| sizes.iter().find(|it| it.0 == services).map(|it| it.1).context("it was measured");
    let (small, large) = (of(100)?, of(10_000)?);

    let mut report = Figures::new("CASE, 10 ENDPOINTS EACH");
    let mut row = |case: &str, goal, measured, unit, digits| {
        report.row(&format!("10k services: {case}"), goal, measured, unit, digits);
    };
    row("connect + close through one address / direct", 1.08, large.one / large.direct, "x", 3);
    row("connect + close through a random address / direct", 1.2, large.any / large.direct, "x", 3);
    row("the same / through one of 100 addresses", 1.2, large.any / small.any, "x", 3);
    row("a connect to one address, in the program", 250.0, large.hit, "ns", 0);
    // Most of it is memory access: the tables of so many Services are in no cache.
    row("a connect to a random address, in the program", 1000.0, large.any_hit, "ns", 0);
    row("a connect to no Service, in the program", 60.0, large.miss, "ns", 0);
    row("a close, in the program", 60.0, large.close, "ns", 0);
    row("connect + close, more than without passive health", 150.0, large.one - large.unwatched, "ns", 0);
    row("UDP: socket + sendto + close, more than direct", 200.0, large.datagram, "ns", 0);
    row("UDP: memory of the proxy for an open socket", 50.0, large.memory, "B", 0);
    report.figure("10k services: sock_ops, both ends of a direct connection", large.passing, "ns", 0);
    report.figure("10k services: a connect to one address, in the program of a trace", large.traced, "ns", 0);
    report.figure("the same with steps (-v)", large.traced_steps, "ns", 0);
    let by_services = |figure: fn(&ConnectFigures) -> f64| -> Vec<(f64, f64)> {
        sizes.iter().map(|(services, it)| (*services as f64, figure(it))).collect()
    };
    report.series(DIRECT, by_services(|it| it.direct));
    report.series(ONE, by_services(|it| it.one));
    report.series(ANY, by_services(|it| it.any));
    report.series(PROGRAM_MISS, by_services(|it| it.miss));
    report.series(PROGRAM_HIT, by_services(|it| it.hit));
    report.series(PROGRAM_ANY, by_services(|it| it.any_hit));
    Ok(report.method(
        "Over loopback, IPv4; TCP where not said otherwise. Time in the program is the kernel's run time less that of a program that returns at \
         once.",
    ))
}

/// The address of a Service; there are 65,536.
fn address(n: usize) -> SocketAddr {
    (Ipv4Addr::from(0x0a60_0000 + n as u32), 80).into()
}

fn measure(binary: &Path, services: usize) -> Result<ConnectFigures> {
    status("Measuring", &format!("{services} services of {ENDPOINTS} endpoints"));
    let node = TestNode::enter(Sandbox::new("bench")?)?;
    let mut manifests: Vec<_> = (0..services).map(service).collect();
    manifests.push(service(services).annotation("kube-proxy-ebpf.io/passive-health", "off"));
    node.write(&manifests);
    let memory = MemoryCgroup::new(node.sandbox())?;
    // All Services are in one namespace.
    let command = AgentCommand::run(binary, node.sandbox(), &node.manifests(), NODE)
        .args(["--max-namespace-entries=1000000"])
        .memory_cgroup(&memory);
    // Every endpoint's address is local: one listener accepts for all of them.
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT))?;
    listener.set_nonblocking(true)?;
    let mut agent = command.start(node.sandbox())?;
    let last = address(services);
    agent.wait_until(Duration::from_secs(120), || TcpStream::connect(last).is_ok())?;
    drain(&listener);

    let direct = SocketAddr::new(endpoint(0, 0), PORT);
    let mut rng = Rng::with_seed(1);
    let [direct_time, one, any, unwatched] = medians_in_rotation(PAIRS, |which| {
        let to = match which {
            0 => direct,
            1 => address(0),
            2 => address(rng.usize(..services)),
            _ => address(services),
        };
        connect_and_close(&listener, to)
    })?;

    // Sockets without an entry.
    let link = |hook: &str| node.sandbox().pins().join("links").join(hook);
    let idle = run_time(&link("sock_release"), None, || {
        for _ in 0..CONNECTS {
            drop(socket(AddressFamily::Inet, SockType::Raw, SockFlag::empty(), SockProtocol::Icmp)?);
        }
        Ok(())
    })?;
    let of_hook = |hook: &str, address: &mut dyn FnMut() -> SocketAddr| {
        let mean = run_time(&link(hook), None, || {
            (0..CONNECTS).try_for_each(|_| connect_and_close(&listener, address()).map(drop))
        })?;
        anyhow::Ok((mean - idle).max(0.0))
    };
    let traced = |arguments: &[&str]| {
        let _trace = start_trace(binary, &node, arguments)?;
        of_hook("connect4", &mut || address(0))
    };
    let datagram = time_datagrams(direct)?;
    let before = memory.usage()?;
    let sockets =
        (0..DATAGRAM_SOCKETS).map(|_| send_from_new_socket(address(0))).collect::<Result<Vec<_>>>()?;
    let charged = memory.usage()?.saturating_sub(before) as f64 / sockets.len() as f64;
    // They own slots, which further sockets would find taken.
    drop(sockets);
    Ok(ConnectFigures {
        datagram,
        memory: charged,
        direct: direct_time,
        one,
        unwatched,
        any,
        hit: of_hook("connect4", &mut || address(0))?,
        any_hit: of_hook("connect4", &mut || address(rng.usize(..services)))?,
        miss: of_hook("connect4", &mut || direct)?,
        close: of_hook("sock_release", &mut || address(0))?,
        passing: run_time(&link("sock_ops"), Some(CONNECTS), || {
            (0..CONNECTS).try_for_each(|_| connect_and_close(&listener, direct).map(drop))
        })?,
        // Last: the product's programs return some time after a trace has ended.
        traced: traced(&[])?,
        traced_steps: traced(&["-v"])?,
    })
}

/// Starts a trace whose lines are not kept, and waits until the programs are attached.
fn start_trace(binary: &Path, node: &TestNode, arguments: &[&str]) -> Result<KilledOnDrop> {
    let mut command = agent::cli(binary, node.sandbox(), "trace");
    let child =
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let mut trace = KilledOnDrop(child);
    // Behind the first lines of the log.
    let mut lines = BufReader::new(trace.0.stderr.take().context("a pipe")?).lines();
    let begins = lines.by_ref().map_while(Result::ok).any(|it| it.starts_with("tracing"));
    ensure!(begins, "the trace does not begin");
    Ok(trace)
}

/// The median of what a datagram of a new socket takes longer to a Service than to an endpoint, in nanoseconds.
fn time_datagrams(direct: SocketAddr) -> Result<f64> {
    let server = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT))?;
    server.set_nonblocking(true)?;
    let [direct, service] = medians_in_rotation(PAIRS, |which| {
        let to = [direct, address(0)][which];
        let begin = Instant::now();
        drop(send_from_new_socket(to)?);
        let took = begin.elapsed();
        while server.recv(&mut [0; 8]).is_ok() {}
        Ok(took.as_nanos() as f64)
    })?;
    Ok(service - direct)
}

fn send_from_new_socket(to: SocketAddr) -> Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    socket.send_to(b"?", &to.into())?;
    Ok(socket)
}

fn service(n: usize) -> Service {
    let service = Service::new(&format!("s{n}"), &[address(n).ip()]);
    let service = service.port("tcp", "TCP", 80, PORT).port("udp", "UDP", 80, PORT);
    (0..ENDPOINTS).fold(service, |it, slot| it.endpoint(&format!("p{slot}"), &[endpoint(n, slot)]))
}

fn endpoint(service: usize, slot: u32) -> IpAddr {
    // Services share addresses: there are more endpoints than addresses in the namespace.
    Ipv4Addr::from(0x0af4_0100 + (service as u32 * ENDPOINTS + slot) % 60_000).into()
}

/// The time of a connect and a close, in nanoseconds; nothing is left to be accepted.
fn connect_and_close(listener: &TcpListener, address: SocketAddr) -> Result<f64> {
    let took = timed_connect(address)?;
    drain(listener);
    Ok(took)
}

/// The time of a connect and a close, in nanoseconds.
pub(crate) fn timed_connect(address: SocketAddr) -> Result<f64> {
    let begin = Instant::now();
    let stream = TcpStream::connect(address).with_context(|| format!("connect to {address}"))?;
    let mut took = begin.elapsed();
    // Without TIME_WAIT, which would exhaust the ports.
    reset_on_close(&stream)?;
    let begin = Instant::now();
    drop(stream);
    took += begin.elapsed();
    Ok(took.as_nanos() as f64)
}

fn drain(listener: &TcpListener) {
    while listener.accept().is_ok() {}
}
