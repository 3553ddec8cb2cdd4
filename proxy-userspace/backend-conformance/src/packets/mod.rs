//! A backend that is asked by packets: what leaves the node after the first packet of a connection says where it goes.
//!
//! Invariant: an answer does not depend on time. A packet that was sent after the question, and that no Service has, comes
//! back after everything that the kernel has made of the question.

mod network;
mod packet;
mod place;
mod relay;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use model::Protocol;
use socket2::{Domain, Socket, Type};

use self::{
    network::Network,
    packet::{Kind, Packet, first, parse, reply, reset},
    place::{Cgroup, Pinned},
    relay::Relay,
};
use crate::{
    Interface, RunError, RunOptions,
    backend::Backend,
    lines,
    oracle::{Answer, Lookup, Tolerance, is_node, line},
    wait::Wait,
};

/// The number of connections in a round, for each expected endpoint.
const PER_ROUND: usize = 8;
/// After how many rounds an endpoint that was not chosen is missing.
const MAX_ROUNDS: usize = 16;
/// The time limit for the kernel to handle a packet; only a hang takes as long.
const KERNEL_TIMEOUT: Duration = Duration::from_secs(60);
/// After how long a client's kernel sends the first packet of a connection again (RFC 6298, 2.1).
const FIRST_RETRANSMISSION: Duration = Duration::from_secs(1);
/// Source and destination of the packets that mark the end of an answer.
const SENTINELS: [[&str; 2]; 2] =
    [["198.18.255.1", "198.18.255.2"], ["fd00:ffff:ffff::1", "fd00:ffff:ffff::2"]];

/// A backend in a network of its own; killed when dropped.
pub(crate) struct PacketBackend {
    child: Child,
    network: Network,
    interface: Interface,
    /// Counts the packets that were sent. Each has a source of its own: of one that it knows, conntrack also knows the endpoint.
    sent: u32,
    _cpu: Pinned,
    _cgroup: Option<Cgroup>,
    _relay: Option<Relay>,
}

impl PacketBackend {
    /// `brain` is the socket of the brain, which a backend that listens reaches by TCP.
    pub(crate) fn start(mut command: Command, options: &RunOptions, brain: &Path) -> Result<Self, RunError> {
        let RunOptions { interface, log, .. } = options;
        let cgroup = match interface {
            Interface::Sockets { cgroup } => Some(Cgroup::enter(cgroup).map_err(RunError::Network)?),
            Interface::Lines | Interface::Packets | Interface::Listeners => None,
        };
        let is_listener = *interface == Interface::Listeners;
        let network = Network::new(is_listener).map_err(RunError::Network)?;
        let log = log.as_ref().map(|it| File::options().create(true).append(true).open(it));
        let stderr = log.transpose().map_err(RunError::Network)?.map_or_else(Stdio::null, Into::into);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        let start_relay = || {
            let listener = network.on_node(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).flatten();
            listener.and_then(|it| Relay::start(it, brain.to_owned()))
        };
        let relay = is_listener.then(start_relay).transpose().map_err(RunError::Network)?;
        command.envs(relay.as_ref().map(|it| ("KUBE_PROXY_EBPF_TARGET", it.target())));
        let child = network.on_node(|| command.spawn()).map_err(RunError::Network)?;
        let child = child.map_err(|error| lines::spawn_error(&command, error))?;
        let _cpu = Pinned::to_this_cpu().map_err(RunError::Network)?;
        let interface = interface.clone();
        Ok(Self { child, network, interface, sent: 0, _cpu, _cgroup: cgroup, _relay: relay })
    }

    fn is_asked_by_sockets(&self, lookup: &Lookup) -> bool {
        // A socket of the node has no source outside, and no SCTP is needed for that.
        let by_sockets = matches!(self.interface, Interface::Sockets { .. });
        by_sockets && lookup.is_from_any_pod() && lookup.protocol != Protocol::Sctp
    }

    /// Makes connections, and counts where they went.
    fn round(
        &mut self,
        lookup: &Lookup,
        count: usize,
        wait: &mut Wait<'_>,
    ) -> io::Result<BTreeMap<String, usize>> {
        let mut found = BTreeMap::new();
        let is_listener = self.interface == Interface::Listeners;
        if !is_listener && !self.is_asked_by_sockets(lookup) {
            self.packets(lookup, count, &mut found)?;
            return Ok(found);
        }
        for _ in 0..count {
            let answer = if is_listener { self.listener(lookup, wait)? } else { self.socket(lookup)? };
            *found.entry(answer).or_default() += 1;
        }
        Ok(found)
    }

    /// A client that no connection had before.
    fn client(&mut self, lookup: &Lookup) -> SocketAddr {
        self.sent = self.sent.wrapping_add(1);
        let [.., high, low] = self.sent.to_be_bytes();
        let ip = match lookup.source {
            source if !lookup.is_from_anyone() => source,
            IpAddr::V4(it) => {
                let [a, b, ..] = it.octets();
                IpAddr::from([a, b, high, low.max(1)])
            }
            IpAddr::V6(it) => {
                let mut octets = it.octets();
                octets[12..14].copy_from_slice(&[high, low]);
                IpAddr::from(octets)
            }
        };
        SocketAddr::new(ip, numbered_port(self.sent))
    }

    /// Packets of clients that are elsewhere.
    fn packets(
        &mut self,
        lookup: &Lookup,
        count: usize,
        found: &mut BTreeMap<String, usize>,
    ) -> io::Result<()> {
        self.drain(lookup)?;
        let mut clients = BTreeSet::new();
        for _ in 0..count {
            let client = self.client(lookup);
            self.network
                .send(&first(lookup.protocol, client, lookup.destination), lookup.destination.ip())?;
            clients.insert(client);
        }
        let mut answers = Vec::new();
        self.until_sentinel(lookup, |packet, _| {
            answers.extend(match packet.kind {
                Kind::First { protocol, .. } if protocol == lookup.protocol => {
                    Some(going_to(packet.destination, lookup))
                }
                Kind::Refused
                    if clients.contains(&packet.source) || clients.contains(&packet.destination) =>
                {
                    Some("refuse".to_owned())
                }
                _ => None,
            });
            Ok(())
        })?;
        let dropped = count.saturating_sub(answers.len());
        for answer in answers {
            *found.entry(answer).or_default() += 1;
        }
        // The kernel may limit the rate at which it refuses.
        if dropped > 0 && !found.contains_key("refuse") {
            found.insert("drop".to_owned(), dropped);
        }
        Ok(())
    }

    /// A connection of a socket on the node.
    fn socket(&mut self, lookup: &Lookup) -> io::Result<String> {
        self.drain(lookup)?;
        let destination = lookup.destination;
        let is_tcp = lookup.protocol == Protocol::Tcp;
        let connected = self.network.on_node(|| {
            let kind = if is_tcp { Type::STREAM } else { Type::DGRAM };
            let socket = Socket::new(Domain::for_address(destination), kind, None)?;
            socket.set_linger(Some(Duration::ZERO))?;
            socket.set_nonblocking(true)?;
            match socket.connect(&destination.into()) {
                Err(error) if error.raw_os_error() != Some(nix::errno::Errno::EINPROGRESS as i32) => {
                    Err(error)
                }
                _ => Ok(socket),
            }
        })?;
        let socket = match connected {
            Ok(it) => it,
            // Before Linux 5.18 a program cannot choose the error.
            Err(error)
                if [io::ErrorKind::ConnectionRefused, io::ErrorKind::PermissionDenied]
                    .contains(&error.kind()) =>
            {
                return Ok("refuse".to_owned());
            }
            Err(error) => return Ok(format!("the error of connect(2): {error}")),
        };
        if !is_tcp && let Err(error) = socket.send(b"?") {
            // The kernel says so if netfilter refuses or drops what a socket sends.
            let is_refused = error.kind() == io::ErrorKind::PermissionDenied;
            return Ok(if is_refused {
                "refuse".to_owned()
            } else {
                format!("the error of send(2): {error}")
            });
        }
        let mut answer = None;
        let mut replies = Vec::new();
        self.until_sentinel(lookup, |packet, bytes| {
            if matches!(packet.kind, Kind::First { protocol, .. } if protocol == lookup.protocol) {
                answer = Some(going_to(packet.destination, lookup));
                replies.extend(reply(packet, bytes).map(|it| (it, packet.source.ip())));
            }
            Ok(())
        })?;
        // The connection is made, so that the endpoint does not count as failing; a datagram stays without an answer.
        for (bytes, destination) in replies.iter().filter(|_| is_tcp) {
            self.network.send(bytes, *destination)?;
        }
        let is_refused = || socket.take_error().is_ok_and(|it| it.is_some());
        Ok(match answer {
            Some(answer) => answer,
            None if is_refused() => "refuse".to_owned(),
            None => "drop".to_owned(),
        })
    }

    /// A connection of a client that is elsewhere, to a backend that makes one of its own to an endpoint.
    fn listener(&mut self, lookup: &Lookup, wait: &mut Wait<'_>) -> io::Result<String> {
        self.drain(lookup)?;
        let (client, destination) = (self.client(lookup), lookup.destination);
        let first = first(lookup.protocol, client, destination);
        let begin = Instant::now();
        let mut retransmission = begin;
        let (mut is_accepted, mut asked) = (false, None::<(Packet, Vec<u8>)>);
        let answer = loop {
            if wait.is_over(begin) {
                break "drop".to_owned();
            }
            let now = Instant::now();
            if now >= retransmission {
                if !is_accepted {
                    self.network.send(&first, destination.ip())?;
                }
                // The answer, or what acknowledges it, may have been lost.
                if let Some((packet, bytes)) = &asked {
                    self.answer(packet, bytes)?;
                }
                retransmission = now + FIRST_RETRANSMISSION;
            }
            let Some((packet, bytes)) = self.network.receive(destination.ip(), FIRST_RETRANSMISSION)? else {
                continue;
            };
            let is_nodes = is_node(packet.source.ip());
            match packet.kind {
                Kind::First { protocol, .. } if is_nodes && protocol == lookup.protocol => {
                    self.answer(&packet, &bytes)?;
                    if protocol != Protocol::Tcp {
                        break going_to(packet.destination, lookup);
                    }
                    asked = Some((packet, bytes));
                }
                // Before that, the backend's kernel may send the first packet again, which would answer the next question.
                Kind::Acknowledged if asked.as_ref().is_some_and(|(it, _)| packet.is_of(it)) => {
                    break going_to(packet.destination, lookup);
                }
                Kind::Refused if [packet.source, packet.destination].contains(&client) => {
                    break "refuse".to_owned();
                }
                Kind::Accepted { .. } if packet.destination == client => {
                    is_accepted = true;
                    self.answer(&packet, &bytes)?;
                }
                // The backend ends those of former questions whenever it comes to that.
                Kind::Ended { .. } => self.answer(&packet, &bytes)?,
                _ => {}
            }
        };
        if is_accepted {
            self.network.send(&reset(client, destination), destination.ip())?;
        }
        Ok(answer)
    }

    /// Sends what the other side of a connection does.
    fn answer(&self, packet: &Packet, bytes: &[u8]) -> io::Result<()> {
        match reply(packet, bytes) {
            Some(it) => self.network.send(&it, packet.source.ip()),
            None => Ok(()),
        }
    }

    /// Takes what is left of former questions, and ends their connections.
    fn drain(&mut self, lookup: &Lookup) -> io::Result<()> {
        while let Some((packet, bytes)) = self.network.receive(lookup.destination.ip(), Duration::ZERO)? {
            if matches!(packet.kind, Kind::Ended { .. }) && self.interface != Interface::Packets {
                self.answer(&packet, &bytes)?;
            }
        }
        Ok(())
    }

    /// Looks at everything that leaves the node before a packet that is sent now.
    fn until_sentinel(
        &mut self,
        lookup: &Lookup,
        mut each: impl FnMut(&Packet, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let [source, destination] = SENTINELS[usize::from(lookup.destination.is_ipv6())].map(|it| {
            let ip: IpAddr = it.parse().expect("it is an address");
            ip
        });
        self.sent = self.sent.wrapping_add(1);
        let source = SocketAddr::new(source, numbered_port(self.sent));
        let sentinel = first(Protocol::Udp, source, (destination, 9).into());
        let expected = parse(&sentinel);
        let begin = Instant::now();
        self.network.send(&sentinel, destination)?;
        loop {
            match self.network.receive(destination, FIRST_RETRANSMISSION)? {
                Some((packet, _)) if Some(packet) == expected => return Ok(()),
                Some((packet, bytes)) => each(&packet, &bytes)?,
                // A busy machine may lose one: an interface is up before the kernel queues packets for it.
                None if begin.elapsed() < KERNEL_TIMEOUT => self.network.send(&sentinel, destination)?,
                None => {
                    let seconds = KERNEL_TIMEOUT.as_secs();
                    let text =
                        format!("a packet that no Service has did not leave the node within {seconds} s");
                    return Err(io::Error::new(io::ErrorKind::TimedOut, text));
                }
            }
        }
    }
}

impl Backend for PacketBackend {
    fn ask(&mut self, lookup: &Lookup, expected: &Answer, wait: &mut Wait<'_>) -> Result<String, String> {
        if let Ok(Some(status)) = self.child.try_wait() {
            return Err(format!("the backend ended: {status}"));
        }
        let Answer { endpoints: expected, has_affinity, .. } = expected;
        let mut found = BTreeSet::new();
        for _ in 0..MAX_ROUNDS {
            let count = if expected.len() > 1 { PER_ROUND * expected.len() } else { 2 };
            let round =
                self.round(lookup, count, wait).map_err(|it| format!("asking `{lookup}` failed: {it}"))?;
            found.extend(round.into_keys());
            let is_one_enough = *has_affinity && self.tolerance(lookup).has_one_client;
            if expected.is_subset(&found) || is_one_enough && !found.is_disjoint(expected) {
                break;
            }
        }
        Ok(line(&found))
    }

    fn tolerance(&self, lookup: &Lookup) -> Tolerance {
        let by_sockets = self.is_asked_by_sockets(lookup);
        let is_listener = self.interface == Interface::Listeners;
        Tolerance {
            has_one_client: by_sockets || !lookup.is_from_anyone(),
            refuses_drops: by_sockets || is_listener,
            refuses_unmatched: is_listener || is_node(lookup.destination.ip()),
        }
    }
}

impl Drop for PacketBackend {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The answer if a connection goes there: nothing, if that is where it should have gone without a Service.
fn going_to(endpoint: SocketAddr, lookup: &Lookup) -> String {
    if endpoint == lookup.destination { String::new() } else { endpoint.to_string() }
}

/// One of 40,000 ports of clients, for the packet of a number.
fn numbered_port(number: u32) -> u16 {
    u16::try_from(20_000 + number % 40_000).expect("it is below 60,000")
}
