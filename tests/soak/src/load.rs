//! The load: threads that send requests to the Services over new and over long-lived sockets.
//! Invariant: each reply is checked against the history at once.

use std::{
    collections::{BTreeMap, HashMap},
    fmt, io,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use fastrand::Rng;
use parking_lot::Mutex;
use tests::{EchoConnection, Transport, client, request};

use crate::{
    history::{FrontendKey, History, Reply, frontend},
    random_cluster,
};

/// How long a thread sleeps between two requests.
const REQUEST_INTERVAL: Duration = Duration::from_millis(1);
/// How many long-lived sockets of each kind there are.
const LONG_LIVED: usize = 6;
/// How many clients send requests from addresses of their own.
const CLIENTS: u8 = 8;
const MAX_FAILURE_TEXTS: usize = 20;

/// What is counted, by its name in the report: requests by kind, and checks that failed.
const COUNTS: [&str; 10] =
    [TCP, UDP, UNCONNECTED, REPEATED, LASTING, REFUSED, TERMINATED, FAILED, MISROUTED, BROKEN];
const TCP: &str = "TCP connects";
const UDP: &str = "requests over new connected UDP sockets";
const UNCONNECTED: &str = "requests over new unconnected UDP sockets";
/// From clients with addresses of their own.
const REPEATED: &str = "requests from repeat clients";
const LASTING: &str = "requests over long-lived sockets";
/// To Services without endpoints.
const REFUSED: &str = "of these requests, correctly refused";
/// Because their endpoint was removed.
const TERMINATED: &str = "connected UDP sockets correctly terminated";
/// Neither a reply nor an error that a state explains.
const FAILED: &str = "FAILED";
/// Replies from an endpoint that no state explains.
const MISROUTED: &str = "MISROUTED";
/// Long-lived sockets that broke, lost the Service's address or left an active endpoint; clients that lost an active endpoint in
/// spite of affinity.
const BROKEN: &str = "LONG-LIVED SOCKETS BROKEN";

#[derive(Default)]
pub(crate) struct LoadState {
    pub(crate) history: Mutex<History>,
    counts: Mutex<BTreeMap<&'static str, u64>>,
    stop: AtomicBool,
    failure_texts: Mutex<Vec<String>>,
}

impl LoadState {
    /// Every count, with its name for the report.
    pub(crate) fn rows(&self) -> [(&'static str, u64); 10] {
        let counts = self.counts.lock();
        COUNTS.map(|it| (it, counts.get(it).copied().unwrap_or_default()))
    }

    pub(crate) fn failures(&self) -> u64 {
        let counts = self.counts.lock();
        [FAILED, MISROUTED, BROKEN].iter().filter_map(|it| counts.get(it)).sum()
    }

    fn count(&self, what: &'static str) {
        assert!(COUNTS.contains(&what), "`{what}` is not in the report");
        *self.counts.lock().entry(what).or_default() += 1;
    }

    pub(crate) fn failure_texts(&self) -> Vec<String> {
        self.failure_texts.lock().clone()
    }

    fn fail(&self, what: &'static str, text: fmt::Arguments<'_>) {
        self.count(what);
        let mut texts = self.failure_texts.lock();
        if texts.len() < MAX_FAILURE_TEXTS {
            texts.push(text.to_string());
        }
    }

    fn fail_broken(&self, text: fmt::Arguments<'_>) {
        self.fail(BROKEN, text);
    }

    fn check(&self, of: FrontendKey, kind: &str, reply: &Reply, began: Instant) {
        let ended = Instant::now();
        let history = self.history.lock();
        if history.explains(of, reply, (began, ended)) {
            if !matches!(reply, Reply::From(_)) {
                self.count(REFUSED);
            }
            return;
        }
        let state = history.newest();
        drop(history);
        let what = if matches!(reply, Reply::From(_)) { MISROUTED } else { FAILED };
        let took = ended.duration_since(began);
        self.fail(what, format_args!("{kind} {}/{} in state {state}, after {took:?}: {reply:?}", of.0, of.1));
    }
}

/// The threads; they end when dropped.
pub(crate) struct SoakLoad {
    state: Arc<LoadState>,
    threads: Vec<JoinHandle<()>>,
}

impl SoakLoad {
    /// Starts the threads in the calling thread's network namespace; fails if a long-lived socket cannot be created.
    pub(crate) fn start(state: &Arc<LoadState>, seed: u64) -> io::Result<Self> {
        let mut long_lived = LongLivedSockets::open()?;
        let mut load = Self { state: Arc::clone(state), threads: Vec::new() };
        let kinds = [Transport::Tcp, Transport::Tcp, Transport::Udp, Transport::UdpUnconnected];
        for (n, transport) in (1..).zip(kinds) {
            let mut rng = Rng::with_seed(seed.wrapping_add(n));
            load.spawn(move |state| request_over_new_socket(state, transport, &mut rng));
        }
        load.spawn(move |state| long_lived.request(state));
        let mut clients = RepeatClients::default();
        let mut rng = Rng::with_seed(seed);
        load.spawn(move |state| clients.request(state, &mut rng));
        Ok(load)
    }

    fn spawn(&mut self, mut request: impl FnMut(&LoadState) + Send + 'static) {
        let state = Arc::clone(&self.state);
        self.threads.push(thread::spawn(move || {
            while !state.stop.load(Ordering::Relaxed) {
                request(&state);
                thread::sleep(REQUEST_INTERVAL);
            }
        }));
    }
}

impl Drop for SoakLoad {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                self.state.fail_broken(format_args!("a thread of the load panicked"));
            }
        }
    }
}

fn request_over_new_socket(state: &LoadState, transport: Transport, rng: &mut Rng) {
    let Some(address) = rng.choice(random_cluster::addresses()) else { return };
    let began = Instant::now();
    let reply = Reply::of(request(transport, address));
    let (what, kind) = match transport {
        Transport::Tcp => (TCP, "connect"),
        Transport::Udp => (UDP, "connected UDP"),
        Transport::UdpUnconnected => (UNCONNECTED, "sendto"),
    };
    state.count(what);
    state.check(frontend(transport, address), kind, &reply, began);
}

/// Clients with an address each, which open a socket per request: they must keep their endpoint where a Service has affinity.
#[derive(Default)]
struct RepeatClients {
    last: HashMap<(Ipv4Addr, SocketAddr), (IpAddr, Instant)>,
}

impl RepeatClients {
    fn request(&mut self, state: &LoadState, rng: &mut Rng) {
        let Some(service) = rng.choice(random_cluster::cluster_addresses()) else { return };
        let source = Ipv4Addr::new(10, 244, 3, rng.u8(1..=CLIENTS));
        let of = frontend(Transport::Udp, service);
        let began = Instant::now();
        let result = client::retry_while_terminated(|| UdpClient::at(source, service)?.connect());
        state.count(REPEATED);
        let reply = Reply::of(result);
        state.check(of, "connected UDP of a repeat client", &reply, began);
        let Reply::From(now) = reply else { return };
        if let Some((before, at)) = self.last.insert((source, service), (now, began))
            && before != now
            && state.history.lock().kept_throughout(of, before, (at, Instant::now()))
        {
            state.fail_broken(format_args!(
                "the client {source} of {service} lost the active endpoint {before} to {now}"
            ));
        }
    }
}

/// Sockets that live as long as the soak.
struct LongLivedSockets {
    tcp: Vec<(EchoConnection, SocketAddr)>,
    connected: Vec<UdpClient>,
    unconnected: Vec<UdpClient>,
}

/// A UDP socket, and the endpoint that last answered.
struct UdpClient {
    socket: UdpSocket,
    service: SocketAddr,
    last: Option<(IpAddr, Instant)>,
}

impl UdpClient {
    fn new(service: SocketAddr) -> io::Result<Self> {
        Ok(Self { socket: client::udp_socket(service)?, service, last: None })
    }

    fn at(source: Ipv4Addr, service: SocketAddr) -> io::Result<Self> {
        Ok(Self { socket: client::udp_socket_at((source, 0).into())?, service, last: None })
    }

    /// Connects and sends the first request; returns the endpoint's name.
    fn connect(&self) -> io::Result<String> {
        self.socket.connect(self.service)?;
        self.socket.send(b"who?")?;
        self.receive()
    }

    fn receive(&self) -> io::Result<String> {
        let (name, from) = client::receive(&self.socket)?;
        if (from.ip(), from.port()) != (self.service.ip(), self.service.port()) {
            return Err(io::Error::other(format!("the reply came from {from}")));
        }
        Ok(name)
    }

    /// A request over an unconnected socket. It may move only if its endpoint was inactive at some time since the last request.
    fn request_unconnected(&mut self, state: &LoadState) {
        let of = frontend(Transport::UdpUnconnected, self.service);
        let began = Instant::now();
        let reply = Reply::of(self.socket.send_to(b"who?", self.service).and_then(|_| self.receive()));
        state.check(of, "sendto over a long-lived socket", &reply, began);
        let Reply::From(now) = reply else { return };
        if let Some((before, at)) = self.last
            && before != now
            && state.history.lock().served_throughout(of, before, (at, Instant::now()))
        {
            let service = self.service;
            state.fail_broken(format_args!(
                "a socket of {service} left the active endpoint {before} for {now}"
            ));
        }
        self.last = Some((now, began));
    }

    /// A request over a connected socket. It keeps its endpoint, and may be terminated once that is no longer active.
    fn request_connected(&mut self, state: &LoadState) {
        let service = self.service;
        let of = frontend(Transport::Udp, service);
        let began = Instant::now();
        let Some((endpoint, since)) = self.last else {
            // A new socket: the previous one may have been terminated.
            let result = client::retry_while_terminated(|| {
                let client = Self::new(service)?;
                let name = client.connect()?;
                *self = client;
                Ok(name)
            });
            let reply = Reply::of(result);
            state.check(of, "connected UDP", &reply, began);
            if let Reply::From(endpoint) = reply {
                self.last = Some((endpoint, began));
            }
            return;
        };
        // It may be terminated between any two of these calls.
        let result = self.socket.send(b"who?").and_then(|_| Ok((self.receive()?, self.socket.peer_addr()?)));
        match result {
            Ok((name, peer)) if name == endpoint.to_string() && peer == service => {}
            Ok((name, peer)) => state.fail_broken(format_args!(
                "a socket connected to {service}, {endpoint}: {name} replies as {peer}"
            )),
            Err(error) => {
                self.last = None;
                if state.history.lock().served_throughout(of, endpoint, (since, Instant::now())) {
                    state.fail_broken(format_args!("a socket connected to {service}, {endpoint}: {error}"));
                } else {
                    state.count(TERMINATED);
                }
            }
        }
    }
}

impl LongLivedSockets {
    fn open() -> io::Result<Self> {
        let addresses = random_cluster::addresses();
        let some = || addresses.iter().copied().step_by(addresses.len() / LONG_LIVED);
        let udp = || some().map(UdpClient::new).collect::<io::Result<Vec<_>>>();
        // Some Services have no endpoints at the start.
        let tcp: Vec<_> =
            some().filter_map(|address| Some((EchoConnection::connect(address).ok()?, address))).collect();
        if tcp.is_empty() {
            return Err(io::Error::other("no Service accepts a connection"));
        }
        Ok(Self { tcp, connected: udp()?, unconnected: udp()? })
    }

    fn request(&mut self, state: &LoadState) {
        self.tcp.retain_mut(|(connection, service)| {
            state.count(LASTING);
            let peer = connection.ping().and_then(|()| connection.stream().peer_addr());
            let is_intact = matches!(&peer, Ok(peer) if peer == service);
            if !is_intact {
                state.fail_broken(format_args!("a connection to {service}: {peer:?}"));
            }
            is_intact
        });
        for client in &mut self.unconnected {
            state.count(LASTING);
            client.request_unconnected(state);
        }
        for client in &mut self.connected {
            state.count(LASTING);
            client.request_connected(state);
        }
    }
}
