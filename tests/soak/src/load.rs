//! What asks the Services all the time: fresh sockets of every kind, and sockets that last.
//! The one rule: whatever comes back is held against the history at once.

use std::{
    collections::HashMap,
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use fastrand::Rng;
use tests::{EchoConnection, Transport, client, request};

use crate::{
    cluster,
    history::{Answer, Frontend, History, frontend},
};

/// How long a thread rests between two questions.
const PAUSE: Duration = Duration::from_millis(1);
/// How many sockets of each kind last.
const LASTING: usize = 6;
/// How many clients come again and again.
const CLIENTS: u8 = 8;
/// How many mistakes are told in full.
const TOLD: usize = 20;

/// What all threads share.
#[derive(Default)]
pub(crate) struct Shared {
    pub(crate) history: Mutex<History>,
    pub(crate) counts: Counts,
    stop: AtomicBool,
    mistakes: Mutex<Vec<String>>,
}

/// How much was asked, and how much of it went wrong.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) tcp: AtomicU64,
    pub(crate) udp: AtomicU64,
    pub(crate) unconnected: AtomicU64,
    /// Questions over sockets that last.
    pub(crate) lasting: AtomicU64,
    /// Questions where nobody should have answered, and nobody did.
    pub(crate) refused: AtomicU64,
    /// Connected UDP sockets that were ended because their endpoint serves no more.
    pub(crate) ended: AtomicU64,
    /// Neither an answer nor a refusal that a state explains.
    pub(crate) failed: AtomicU64,
    /// Answers from an endpoint that no state explains.
    pub(crate) misrouted: AtomicU64,
    /// Questions of clients that come again and again.
    pub(crate) returning: AtomicU64,
    /// Lasting sockets that broke, lost the Service's address, or left an endpoint that served; clients that lost the one
    /// they should have kept.
    pub(crate) broken: AtomicU64,
}

pub(crate) fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Shared {
    pub(crate) fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many things went wrong.
    pub(crate) fn wrong(&self) -> u64 {
        let Counts { failed, misrouted, broken, .. } = &self.counts;
        [failed, misrouted, broken].iter().map(|it| it.load(Ordering::Relaxed)).sum()
    }

    /// The first of them, in words.
    pub(crate) fn mistakes(&self) -> Vec<String> {
        self.mistakes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn mistake(&self, counter: &AtomicU64, what: fmt::Arguments<'_>) {
        add(counter);
        let mut mistakes = self.mistakes.lock().unwrap_or_else(PoisonError::into_inner);
        if mistakes.len() < TOLD {
            mistakes.push(what.to_string());
        }
    }

    /// Holds an answer against the history.
    fn judge(&self, of: Frontend, kind: &str, answer: &Answer, began: Instant) {
        let ended = Instant::now();
        let history = self.history();
        if history.explains(of, answer, began, ended) {
            if !matches!(answer, Answer::By(_)) {
                add(&self.counts.refused);
            }
            return;
        }
        let state = history.newest();
        drop(history);
        let counter =
            if matches!(answer, Answer::By(_)) { &self.counts.misrouted } else { &self.counts.failed };
        let took = ended.duration_since(began);
        self.mistake(
            counter,
            format_args!("{kind} {}/{} in state {state}, after {took:?}: {answer:?}", of.0, of.1),
        );
    }
}

/// The threads; they end when dropped.
pub(crate) struct Load {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts to ask, in the calling thread's network namespace.
    ///
    /// # Errors
    ///
    /// If a socket that should last cannot even be made.
    pub(crate) fn start(shared: &Arc<Shared>, seed: u64) -> io::Result<Self> {
        let mut lasting = Lasting::begin()?;
        let mut load = Self { shared: Arc::clone(shared), threads: Vec::new() };
        let kinds = [Transport::Tcp, Transport::Tcp, Transport::Udp, Transport::UdpUnconnected];
        for (n, transport) in (1..).zip(kinds) {
            let mut rng = Rng::with_seed(seed.wrapping_add(n));
            load.spawn(move |shared| fresh(shared, transport, &mut rng));
        }
        load.spawn(move |shared| lasting.ask(shared));
        let mut returning = Returning::default();
        let mut rng = Rng::with_seed(seed);
        load.spawn(move |shared| returning.ask(shared, &mut rng));
        Ok(load)
    }

    fn spawn(&mut self, mut ask: impl FnMut(&Shared) + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        self.threads.push(thread::spawn(move || {
            while !shared.stop.load(Ordering::Relaxed) {
                ask(&shared);
                thread::sleep(PAUSE);
            }
        }));
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                self.shared
                    .mistake(&self.shared.counts.broken, format_args!("a thread of the load panicked"));
            }
        }
    }
}

/// A question over a socket of its own.
fn fresh(shared: &Shared, transport: Transport, rng: &mut Rng) {
    let Some(address) = rng.choice(cluster::addresses()) else { return };
    let began = Instant::now();
    let answer = Answer::of(request(transport, address));
    let (counter, kind) = match transport {
        Transport::Tcp => (&shared.counts.tcp, "connect"),
        Transport::Udp => (&shared.counts.udp, "connected UDP"),
        Transport::UdpUnconnected => (&shared.counts.unconnected, "sendto"),
    };
    add(counter);
    shared.judge(frontend(transport, address), kind, &answer, began);
}

/// Clients by the address that they are bound to, each with a fresh socket for every question.
#[derive(Default)]
struct Returning {
    last: HashMap<(Ipv4Addr, SocketAddr), (IpAddr, Instant)>,
}

impl Returning {
    fn ask(&mut self, shared: &Shared, rng: &mut Rng) {
        let Some(service) = rng.choice(cluster::cluster_addresses()) else { return };
        let source = Ipv4Addr::new(10, 244, 3, rng.u8(1..=CLIENTS));
        let of = frontend(Transport::Udp, service);
        let began = Instant::now();
        let asked = client::retry_while_terminated(|| {
            let it = Asker::from(source, service)?;
            it.socket.connect(service)?;
            it.socket.send(b"who?")?;
            it.receive()
        });
        add(&shared.counts.returning);
        let answer = Answer::of(asked);
        shared.judge(of, "connected UDP of a client", &answer, began);
        let Answer::By(now) = answer else { return };
        let before = self.last.insert((source, service), (now, began));
        if let Some((before, at)) = before
            && before != now
            && shared.history().kept_throughout(of, before, at, Instant::now())
        {
            let text =
                format_args!("the client {source} of {service} lost {before}, which serves, for {now}");
            shared.mistake(&shared.counts.broken, text);
        }
    }
}

/// Sockets that live as long as the soak.
struct Lasting {
    probes: Vec<(EchoConnection, SocketAddr)>,
    connected: Vec<Asker>,
    unconnected: Vec<Asker>,
}

/// A UDP socket, and who answered it last.
struct Asker {
    socket: UdpSocket,
    service: SocketAddr,
    last: Option<(IpAddr, Instant)>,
}

impl Asker {
    fn new(service: SocketAddr) -> io::Result<Self> {
        let any: IpAddr =
            if service.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        Self::from(any, service)
    }

    /// Bound to an address.
    fn from(source: impl Into<IpAddr>, service: SocketAddr) -> io::Result<Self> {
        let socket = UdpSocket::bind((source.into(), 0))?;
        socket.set_read_timeout(Some(client::LIMIT))?;
        Ok(Self { socket, service, last: None })
    }

    fn receive(&self) -> io::Result<String> {
        let mut answer = [0; 64];
        let (length, from) = self.socket.recv_from(&mut answer)?;
        if (from.ip(), from.port()) != (self.service.ip(), self.service.port()) {
            return Err(io::Error::other(format!("the answer came from {from}")));
        }
        Ok(String::from_utf8_lossy(&answer[..length]).trim_end().to_owned())
    }
}

impl Lasting {
    fn begin() -> io::Result<Self> {
        let addresses = cluster::addresses();
        let some = || addresses.iter().copied().step_by(addresses.len() / LASTING);
        let askers = || some().map(Asker::new).collect::<io::Result<Vec<_>>>();
        let mut probes = Vec::new();
        for address in some() {
            // Where nobody serves at first there is nothing to last.
            if let Ok(probe) = EchoConnection::connect(address) {
                probes.push((probe, address));
            }
        }
        if probes.is_empty() {
            return Err(io::Error::other("no Service accepts at first"));
        }
        Ok(Self { probes, connected: askers()?, unconnected: askers()? })
    }

    /// Asks over all of them once.
    fn ask(&mut self, shared: &Shared) {
        let broken = &shared.counts.broken;
        self.probes.retain_mut(|(probe, service)| {
            add(&shared.counts.lasting);
            let peer = probe.ping().and_then(|()| probe.stream().peer_addr());
            let is_fine = matches!(&peer, Ok(peer) if peer == service);
            if !is_fine {
                shared.mistake(broken, format_args!("a connection to {service}: {peer:?}"));
            }
            is_fine
        });
        for asker in &mut self.unconnected {
            add(&shared.counts.lasting);
            ask_unconnected(shared, asker);
        }
        for asker in &mut self.connected {
            add(&shared.counts.lasting);
            ask_connected(shared, asker);
        }
    }
}

/// It may leave its endpoint only if that did not serve at some moment since.
fn ask_unconnected(shared: &Shared, asker: &mut Asker) {
    let of = frontend(Transport::UdpUnconnected, asker.service);
    let began = Instant::now();
    let result = asker.socket.send_to(b"who?", asker.service).and_then(|_| asker.receive());
    let answer = Answer::of(result);
    shared.judge(of, "sendto on a lasting socket", &answer, began);
    let Answer::By(now) = answer else { return };
    if let Some((before, at)) = asker.last
        && before != now
        && shared.history().served_throughout(of, before, at, Instant::now())
    {
        let text = format_args!("a socket asking {} left {before}, which serves, for {now}", asker.service);
        shared.mistake(&shared.counts.broken, text);
    }
    asker.last = Some((now, began));
}

/// It stays with its endpoint, and may be ended once that does not serve.
fn ask_connected(shared: &Shared, asker: &mut Asker) {
    let of = frontend(Transport::Udp, asker.service);
    let began = Instant::now();
    let Some((endpoint, since)) = asker.last else {
        // A new socket: what was connected elsewhere may have been ended.
        let fresh = client::retry_while_terminated(|| {
            let it = Asker::new(asker.service)?;
            it.socket.connect(it.service)?;
            it.socket.send(b"who?")?;
            let name = it.receive()?;
            *asker = it;
            Ok(name)
        });
        let answer = Answer::of(fresh);
        shared.judge(of, "connected UDP", &answer, began);
        if let Answer::By(endpoint) = answer {
            asker.last = Some((endpoint, began));
        }
        return;
    };
    // It may be ended between any two of these calls.
    let result = asker.socket.send(b"who?").and_then(|_| Ok((asker.receive()?, asker.socket.peer_addr()?)));
    match result {
        Ok((name, peer)) => {
            let service = asker.service;
            if name != endpoint.to_string() || peer != service {
                let text =
                    format_args!("a socket connected to {service}, {endpoint}: {name} answers as {peer}");
                shared.mistake(&shared.counts.broken, text);
            }
        }
        Err(error) => {
            asker.last = None;
            if shared.history().served_throughout(of, endpoint, since, Instant::now()) {
                let text = format_args!("a socket connected to {}, {endpoint}: {error}", asker.service);
                shared.mistake(&shared.counts.broken, text);
            } else {
                add(&shared.counts.ended);
            }
        }
    }
}
