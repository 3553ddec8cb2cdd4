//! `cargo xtask bench balance`: how connections are spread over endpoints that are not alike.
//! Invariant: each client begins the next connection when the one before has ended (a closed loop).

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};
use build_tools::{build, command::status};
use socket2::SockRef;
use tests::{
    Sandbox, TestNode,
    agent::AgentCommand,
    fixtures::{TARGET_PORT, WEB4, endpoint, web4},
    test_node::NODE,
};

use crate::figures::Figures;

const FRONTEND: (Ipv4Addr, u16) = (WEB4, 80);
const CLIENTS: usize = 24;
/// How long each endpoint works for a connection, one at a time.
const WORK: [Duration; 3] = [Duration::from_millis(2), Duration::from_millis(2), Duration::from_millis(20)];
/// How long each algorithm is measured.
const LOAD: Duration = Duration::from_secs(8);
const SLOW_START: u64 = 20;

pub(crate) fn bench() -> Result<Figures> {
    let binary = build::build(true)?;
    let mut report = Figures::new("CASE");
    let mut p99 = Vec::new();
    for algorithm in ["random", "least-connections"] {
        status("Measuring", algorithm);
        let mut times = load(&binary, algorithm)?;
        times.sort_unstable();
        let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e3;
        report.figure(&format!("{algorithm}: connections"), times.len() as f64, "", 0);
        report.figure(&format!("{algorithm}: median"), at(50), "ms", 1);
        report.figure(&format!("{algorithm}: p99"), at(99), "ms", 1);
        p99.push(at(99));
    }
    report.row("p99 with least connections, of that at random", 0.75, p99[1] / p99[0], "", 2);
    status("Measuring", "slow start");
    for (seconds, share) in slow_start(&binary)? {
        report.figure(&format!("slow start of {SLOW_START} s: share after {seconds} s"), share, "%", 1);
    }
    Ok(report.method(
        "Two endpoints take 2 ms for a connection and one takes 20 ms, one connection at a time; 24 clients connect in a closed loop. \
         Slow start: the share of connections that a third endpoint gets.",
    ))
}

/// How long each connection took, from the connect to the end.
fn load(binary: &Path, algorithm: &'static str) -> Result<Vec<Duration>> {
    let mut node = TestNode::enter(Sandbox::new("bench")?)?;
    let service = web4(1..=3).annotation("kube-proxy-ebpf.io/load-balancing", algorithm);
    let servers =
        WORK.iter().zip(1..).map(|(work, n)| Server::start(n, *work)).collect::<Result<Vec<_>>>()?;
    node.write(&[service]);
    node.start_with(&AgentCommand::run(binary, node.sandbox(), &node.manifests(), NODE));
    let end = Instant::now() + LOAD;
    let client = || {
        let mut times = Vec::new();
        while Instant::now() < end {
            let begin = Instant::now();
            connect()?;
            times.push(begin.elapsed());
        }
        anyhow::Ok(times)
    };
    let times = thread::scope(|it| {
        let clients: Vec<_> = (0..CLIENTS).map(|_| it.spawn(client)).collect();
        clients
            .into_iter()
            .map(|it| it.join().map_err(|_| anyhow!("a client panicked"))?)
            .collect::<Result<Vec<_>>>()
    })?;
    drop(servers);
    Ok(times.concat())
}

/// The share of an endpoint that is new, in percent, at some seconds after it was added.
fn slow_start(binary: &Path) -> Result<Vec<(u64, f64)>> {
    let mut node = TestNode::enter(Sandbox::new("bench")?)?;
    let with = |n: u8| web4(1..=n).annotation("kube-proxy-ebpf.io/slow-start", &format!("{SLOW_START}s"));
    let servers = (1..=3).map(|n| Server::start(n, Duration::ZERO)).collect::<Result<Vec<_>>>()?;
    node.write(&[with(2)]);
    node.start_with(&AgentCommand::run(binary, node.sandbox(), &node.manifests(), NODE));
    thread::sleep(Duration::from_secs(SLOW_START + 1));
    node.write(&[with(3)]);
    node.wait_until_logged(&["state active revision=2"]);
    let begin = Instant::now();
    let mut shares = Vec::new();
    for seconds in (0..=SLOW_START + 5).step_by(5) {
        thread::sleep((begin + Duration::from_secs(seconds)).saturating_duration_since(Instant::now()));
        const CONNECTIONS: usize = 2000;
        let mut new = 0;
        for _ in 0..CONNECTIONS {
            new += usize::from(connect()? == 3);
        }
        shares.push((seconds, new as f64 * 100.0 / CONNECTIONS as f64));
    }
    drop(servers);
    Ok(shares)
}

/// One connection: the endpoint that answered.
fn connect() -> Result<u8> {
    let mut stream = TcpStream::connect(FRONTEND)?;
    let mut name = [0];
    stream.read_exact(&mut name)?;
    // Without TIME_WAIT, which would exhaust the ports.
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    Ok(name[0])
}

/// An endpoint that works for one connection at a time.
struct Server {
    listener: TcpListener,
    thread: Option<thread::JoinHandle<()>>,
}

impl Server {
    fn start(n: u8, work: Duration) -> Result<Self> {
        let listener = TcpListener::bind((endpoint(n)[0], TARGET_PORT))?;
        let accepting = listener.try_clone()?;
        let serve = move || {
            while let Ok((mut stream, _)) = accepting.accept() {
                thread::sleep(work);
                let _ = stream.write_all(&[n]);
            }
        };
        Ok(Self { listener, thread: Some(thread::spawn(serve)) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ends `accept`.
        let _ = SockRef::from(&self.listener).shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
