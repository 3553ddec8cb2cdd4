//! `cargo xtask bench connect`: what a Service's address costs a program that connects to it.
//! The one rule: every figure is a ratio of pairs, or the kernel's own count; the machine's noise is in both halves.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use tests::{
    Sandbox, TestNode, agent::AgentCommand, client::reset_on_close, manifest::Service,
    program_stats::ProgramStats, test_node::NODE,
};

use crate::{Report, TEN_EACH};
use build_tools::{build, command::status};

const PAIRS: usize = 20_000;
const CONNECTS: usize = 50_000;
const ENDPOINTS: u32 = 10;
const PORT: u16 = 8080;

/// What was measured in front of a number of Services, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Figures {
    /// The median of connect and close: straight to an endpoint.
    direct: f64,
    /// Through the address of one Service.
    one: f64,
    /// Through the address of a Service chosen anew each time.
    any: f64,
    /// The mean time of the connect program when the address is one Service's.
    hit: f64,
    /// The same with a Service chosen anew each time.
    any_hit: f64,
    /// The same when it is nobody's.
    miss: f64,
    /// The mean time of the program that sees sockets close.
    close: f64,
}

/// Measures, and fails if a goal is missed.
pub(crate) fn connect() -> Result<()> {
    let binary = build::build(true)?;
    let small = measure(&binary, 100)?;
    let large = measure(&binary, 10_000)?;

    let mut report = Report::new(TEN_EACH);
    let mut row = |case: &str, goal, measured, unit, digits| {
        report.row(&format!("10k services: {case}"), goal, measured, unit, digits);
    };
    row("connect + close through one address / direct", 1.08, large.one / large.direct, "x", 3);
    row("connect + close through any of them / direct", 1.2, large.any / large.direct, "x", 3);
    row("the same, / through any of 100", 1.2, large.any / small.any, "x", 3);
    row("a connect to one of them, in the program", 250.0, large.hit, "ns", 0);
    // That is memory, not work: the tables of so many are in no cache.
    row("a connect to any of them, in the program", 1000.0, large.any_hit, "ns", 0);
    row("a connect to none of them, in the program", 60.0, large.miss, "ns", 0);
    row("a close, in the program", 60.0, large.close, "ns", 0);
    report.print(
        "TCP over loopback, IPv4. Time in the program is by the kernel's count, less what it counts for a program \
         that returns at once.",
    )
}

/// The address of a Service; there is room for 65,536.
fn address(n: usize) -> SocketAddr {
    (Ipv4Addr::from(0x0a60_0000 + n as u32), 80).into()
}

fn measure(binary: &Path, services: usize) -> Result<Figures> {
    status("Measuring", &format!("{services} services of {ENDPOINTS} endpoints"));
    let world = TestNode::enter(Sandbox::new("bench")?)?;
    let manifests: Vec<_> = (0..services).map(service).collect();
    world.write(&manifests);
    let setting = AgentCommand::run(binary, world.sandbox(), &world.manifests(), NODE);
    // Every endpoint's address is local here: one listener is all of them.
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT))?;
    listener.set_nonblocking(true)?;
    let mut agent = setting.start(world.sandbox())?;
    let last = address(services - 1);
    agent.wait_until(Duration::from_secs(120), || TcpStream::connect(last).is_ok())?;
    drain(&listener);

    let direct = SocketAddr::new(endpoint(0, 0), PORT);
    let mut random = Random(1);
    let mut times = [const { Vec::new() }; 3];
    for round in 0..PAIRS {
        let any = address(random.below(services));
        let mut order = [(0, direct), (1, address(0)), (2, any)];
        order.rotate_left(round % 3);
        for (which, address) in order {
            times[which].push(connect_and_close(&listener, address)?);
        }
    }
    let [straight, one, any] = times.map(median);

    let nothing =
        ProgramStats::of(&world.program("sock_release"), || ProgramStats::close_raw_sockets(CONNECTS))?;
    let program = |name: &str, to: &mut dyn FnMut() -> SocketAddr| {
        let cost = ProgramStats::of(&world.program(name), || {
            (0..CONNECTS).try_for_each(|_| connect_and_close(&listener, to()).map(drop))
        })?;
        anyhow::Ok((cost.mean() - nothing.mean()).max(0.0))
    };
    Ok(Figures {
        direct: straight,
        one,
        any,
        hit: program("connect4", &mut || address(0))?,
        any_hit: program("connect4", &mut || address(random.below(services)))?,
        miss: program("connect4", &mut || direct)?,
        close: program("sock_release", &mut || address(0))?,
    })
}

fn service(n: usize) -> Service {
    let service = Service::new(&format!("s{n}"), &[address(n).ip()]).port("", "TCP", 80, PORT);
    (0..ENDPOINTS).fold(service, |it, slot| it.endpoint(&format!("p{slot}"), &[endpoint(n, slot)]))
}

fn endpoint(service: usize, slot: u32) -> IpAddr {
    // Services share addresses, as there are more endpoints than the namespace has addresses.
    Ipv4Addr::from(0x0af4_0100 + (service as u32 * ENDPOINTS + slot) % 60_000).into()
}

/// The time of a connect and a close, in nanoseconds.
fn connect_and_close(listener: &TcpListener, address: SocketAddr) -> Result<f64> {
    let begin = Instant::now();
    let stream = TcpStream::connect(address).with_context(|| format!("connect to {address}"))?;
    let mut took = begin.elapsed();
    // No TIME_WAIT, or the ports would run out.
    reset_on_close(&stream)?;
    let begin = Instant::now();
    drop(stream);
    took += begin.elapsed();
    drain(listener);
    Ok(took.as_nanos() as f64)
}

/// Takes whoever waits off the listener's queue.
fn drain(listener: &TcpListener) {
    while listener.accept().is_ok() {}
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times[times.len() / 2]
}

/// xorshift32 (Marsaglia, 2003): the same sequence in every run.
struct Random(u32);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0 as usize % limit
    }
}
