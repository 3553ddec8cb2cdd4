//! `cargo xtask bench eject`: a node with a third of the endpoints of a Service dies.
//! Invariant: connects begin at a fixed rate, whatever becomes of those before.

use std::{
    io::ErrorKind,
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener},
    os::fd::AsFd as _,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use build_tools::{
    build,
    command::{output, status},
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use socket2::{Domain, SockRef, Socket, Type};
use tests::{
    NetNs, Sandbox, TestNode,
    agent::AgentCommand,
    fixtures::{TARGET_PORT, WEB4, endpoint, web4},
    test_node::NODE,
};

use crate::figures::Figures;

const ENDPOINTS: u8 = 100;
const FRONTEND: (Ipv4Addr, u16) = (WEB4, 80);
const THREADS: u32 = 8;
/// Between two connects of a thread: 2,000 per second of all.
const INTERVAL: Duration = Duration::from_millis(4);
/// A connect that takes longer is slow.
const SLOW: Duration = Duration::from_secs(1);
/// How long connects are made before the endpoints die, and afterwards.
const BEFORE: Duration = Duration::from_secs(3);
const AFTER: Duration = Duration::from_secs(20);
/// After this time failures should be over.
const LATE: Duration = Duration::from_secs(2);
const TIMELINE_STEP: Duration = Duration::from_millis(250);
/// When the proxy is killed and started again, after the endpoints have died.
const RESTART: Duration = Duration::from_millis(500);

/// The names of series: slow connects in percent, by the second.
pub(crate) const WITHOUT: &str = "without passive health";
pub(crate) const WITH: &str = "with passive health";

#[derive(Clone, Copy, Debug)]
struct Case {
    passive_health: &'static str,
    /// How many endpoints die.
    dead: u8,
    /// When a program gives up a connect.
    patience: Duration,
}

/// What became of the connects after the death.
#[derive(Clone, Debug)]
struct EjectFigures {
    connects: usize,
    slow: usize,
    /// How many of them began later than two seconds after the death.
    late: usize,
    /// How long after the death the last of them began.
    last: Duration,
    /// The share of slow ones among those that began in an interval, in percent, by its seconds after the death.
    timeline: Vec<(f64, f64)>,
}

pub(crate) fn bench() -> Result<Figures> {
    let binary = build::build(true)?;
    let case = |passive_health| Case { passive_health, dead: 30, patience: Duration::from_secs(2) };
    let [without, with] = ["off", "on"].map(|it| measure(&binary, case(it)));
    let (without, with) = (without?, with?);
    let mut report = Figures::new("CASE");
    report.figure("connects", with.connects as f64, "", 0);
    report.figure("slow connects, without passive health", without.slow as f64, "", 0);
    report.figure("slow connects, with", with.slow as f64, "", 0);
    report.figure("those after the first 2 s, without", without.late as f64, "", 0);
    report.series(WITHOUT, without.timeline);
    report.series(WITH, with.timeline);
    let share = with.late as f64 / without.late as f64;
    report.row("those after the first 2 s, with, of those without", 0.02, share, "", 4);
    for patience in [500, 900, 3000].map(Duration::from_millis) {
        let last = measure(&binary, Case { dead: 75, patience, ..case("on") })?.last.as_secs_f64();
        let name = format!("last connect given up after {patience:?}, 75 endpoints dead");
        report.row(&name, 3.0, last, "s", 2);
    }
    Ok(report.method(
        "A node with 30 of 100 endpoints dies under 2,000 connects per second of one client; a slow connect takes more than 1 s. The proxy is \
         killed half a second after the death, and started again. Then the same with 75 of 100, and programs that give up connects \
         earlier or later: when the last connect begins that is slow or given up.",
    ))
}

fn measure(binary: &std::path::Path, case: Case) -> Result<EjectFigures> {
    let Case { passive_health, dead, patience } = case;
    status(
        "Measuring",
        &format!(
            "passive health {passive_health}, {dead} endpoints die, connects given up after {patience:?}"
        ),
    );
    let mut node = TestNode::enter(Sandbox::new("bench")?)?;
    node.write(&[web4(1..=ENDPOINTS)]);
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, TARGET_PORT))?;
    let command = AgentCommand::run(binary, node.sandbox(), &node.manifests(), NODE)
        .args(["--passive-health", passive_health]);
    node.start_with(&command);
    let begin = Instant::now();
    let death = begin + BEFORE;
    let server = listener.try_clone()?;
    let accepting = thread::spawn(move || while server.accept().is_ok() {});
    let clients: Vec<_> = (0..THREADS)
        .map(|n| thread::spawn(move || connect_all(begin + INTERVAL / THREADS * n, patience)))
        .collect();
    thread::sleep(death.saturating_duration_since(Instant::now()));
    kill_endpoints(node.netns(), dead)?;
    thread::sleep(RESTART);
    node.kill();
    node.start_with(&command);
    let mut figures =
        EjectFigures { connects: 0, slow: 0, late: 0, last: Duration::ZERO, timeline: Vec::new() };
    let mut intervals =
        [(0_u32, 0_u32); ((BEFORE.as_millis() + AFTER.as_millis()) / TIMELINE_STEP.as_millis()) as usize];
    for client in clients {
        let Ok(connects) = client.join() else { bail!("a client panicked") };
        for (started, took) in connects? {
            let is_slow = took > SLOW.min(patience);
            let index = (started - begin).as_millis() / TIMELINE_STEP.as_millis();
            if let Some((slow, all)) = intervals.get_mut(index as usize) {
                *slow += u32::from(is_slow);
                *all += 1;
            }
            if started >= death {
                figures.connects += 1;
                figures.slow += usize::from(is_slow);
                figures.late += usize::from(is_slow && started >= death + LATE);
                if is_slow {
                    figures.last = figures.last.max(started - death);
                }
            }
        }
    }
    for (n, (slow, all)) in (0_u32..).zip(intervals) {
        let seconds = (f64::from(n) + 0.5) * TIMELINE_STEP.as_secs_f64() - BEFORE.as_secs_f64();
        figures.timeline.push((seconds, f64::from(slow) * 100.0 / f64::from(all.max(1))));
    }
    // Ends `accept`.
    SockRef::from(&listener).shutdown(Shutdown::Both)?;
    drop(accepting.join());
    ensure!(figures.late > 0 || passive_health == "on", "the endpoints did not die");
    Ok(figures)
}

/// SYNs to the dead endpoints are not answered any more.
fn kill_endpoints(netns: &NetNs, dead: u8) -> Result<()> {
    let rules = format!(
        "add table ip dead; add chain ip dead in {{ type filter hook input priority 0; }}; \
         add rule ip dead in ip daddr {}-{} drop",
        endpoint(1)[0],
        endpoint(dead)[0]
    );
    netns.run(|| output(Command::new("nft").arg(rules))).map(drop)
}

/// The connects of one thread: when each began, and how long it took.
fn connect_all(mut next: Instant, patience: Duration) -> Result<Vec<(Instant, Duration)>> {
    let end = next + BEFORE + AFTER;
    let (mut done, mut pending) = (Vec::new(), Vec::<(Instant, Socket)>::new());
    while next < end || !pending.is_empty() {
        thread::sleep(next.saturating_duration_since(Instant::now()));
        if next < end {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.set_nonblocking(true)?;
            match socket.connect(&SocketAddr::from(FRONTEND).into()) {
                Err(error) if error.raw_os_error() == Some(Errno::EINPROGRESS as i32) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                result => result?,
            }
            pending.push((Instant::now(), socket));
        }
        next += INTERVAL;
        let mut polled: Vec<_> =
            pending.iter().map(|(_, it)| PollFd::new(it.as_fd(), PollFlags::POLLOUT)).collect();
        poll(&mut polled, PollTimeout::ZERO)?;
        let ready: Vec<_> = polled.iter().map(|it| it.any().unwrap_or(false)).collect();
        let mut ready = ready.into_iter();
        pending.retain(|(begin, socket)| {
            let is_done = ready.next().unwrap_or(false) || begin.elapsed() > patience;
            if is_done {
                done.push((*begin, begin.elapsed()));
                // Without TIME_WAIT, which would exhaust the ports.
                let _ = socket.set_linger(Some(Duration::ZERO));
            }
            !is_done
        });
    }
    Ok(done)
}
