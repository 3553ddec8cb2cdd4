//! The attackers of a hostile soak, each a process of its own.
//! Invariant: an attacker does what every pod can do: it has no capability, and network namespace and cgroup are its own.

use std::{
    collections::VecDeque,
    io::Write as _,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream, UdpSocket},
    os::fd::{AsRawFd as _, OwnedFd},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use fastrand::Rng;
use nix::{
    errno::Errno,
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        socket::{
            AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, setsockopt, socket,
            sockopt::IpFreebind,
        },
    },
};
use tests::http::HEALTH_PORT;

use crate::random_cluster;

/// How many sockets an attacker keeps open; then it closes the oldest.
const MAX_SOCKETS: usize = 20_000;
/// How many sockets it opens between two pauses: the machine must stay usable for the victims.
const BURST: usize = 5;
const BURST_INTERVAL: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Attack {
    /// Many UDP sockets send to one Service each: storage for every socket.
    UdpSockets,
    /// Many UDP sockets send to many Services each: the table of their addresses fills.
    UdpAddresses,
    /// Many TCP sockets connect: the slots run out.
    TcpSockets,
    /// Clients with sources that are not theirs: session affinity in eBPF.
    Sources,
    /// Packets with sources that are not theirs, which are never answered: session affinity in nftables.
    SpoofedSyns,
    /// Idle and slow connections to the health port.
    IdleConnections,
}

impl Attack {
    /// Whether the socket path does not see it, as traffic of a pod that comes in as packets.
    pub(crate) fn is_outside(self) -> bool {
        self == Self::SpoofedSyns
    }

    /// Attacks until the process is killed. `gateway` is the node's address on the attacker's link.
    pub(crate) fn perform(self, gateway: Ipv4Addr) -> Result<()> {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("getrlimit")?;
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("setrlimit")?;
        let max = MAX_SOCKETS.min(usize::try_from(hard).unwrap_or(usize::MAX).saturating_sub(64));
        let services: Vec<_> = random_cluster::cluster_addresses();
        let mut rng = Rng::new();
        let mut sockets: VecDeque<OwnedFd> = VecDeque::new();
        loop {
            for _ in 0..BURST {
                let service = *rng.choice(&services).context("there are Services")?;
                let source = Ipv4Addr::new(172, 16 + rng.u8(..16), rng.u8(..), rng.u8(1..));
                // What is refused was defended against.
                let opened = match self {
                    Self::UdpSockets => udp(&[service]),
                    Self::UdpAddresses => udp(&services),
                    Self::TcpSockets => client_from(SockType::Stream, Ipv4Addr::UNSPECIFIED, service),
                    Self::Sources => client_from(SockType::Datagram, source, service),
                    Self::SpoofedSyns => client_from(SockType::Stream, source, service),
                    Self::IdleConnections => idle(SocketAddr::from((gateway, HEALTH_PORT)), rng.bool()),
                };
                sockets.extend(opened);
                if sockets.len() > max {
                    sockets.pop_front();
                }
            }
            thread::sleep(BURST_INTERVAL);
        }
    }
}

fn udp(services: &[SocketAddr]) -> Option<OwnedFd> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.set_nonblocking(true).ok()?;
    for service in services {
        let _ = socket.send_to(b"x", service);
    }
    Some(socket.into())
}

/// A socket that is bound to a source that need not be an address of this namespace; its connection may never be answered.
fn client_from(kind: SockType, source: Ipv4Addr, service: SocketAddr) -> Option<OwnedFd> {
    let SocketAddr::V4(service) = service else { return None };
    let socket = socket(AddressFamily::Inet, kind, SockFlag::SOCK_NONBLOCK, None).ok()?;
    setsockopt(&socket, IpFreebind, &true).ok()?;
    bind(socket.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(source, 0))).ok()?;
    match connect(socket.as_raw_fd(), &SockaddrIn::from(service)) {
        Ok(()) | Err(Errno::EINPROGRESS) => Some(socket),
        Err(_) => None,
    }
}

/// A connection that sends nothing, or the start of a request.
fn idle(address: SocketAddr, is_slow: bool) -> Option<OwnedFd> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok()?;
    if is_slow {
        let _ = stream.write_all(b"GET /livez HTTP/1.1\r\nHost: ");
    }
    Some(stream.into())
}
