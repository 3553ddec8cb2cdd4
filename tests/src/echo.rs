//! An endpoint: a server that replies with its name.
//!
//! It accepts every connection while it lives, and stops when dropped.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::Background;

/// How often a server checks whether it was dropped.
const POLL_INTERVAL_MS: u16 = 20;

/// A TCP and UDP server at one address.
///
/// A TCP connection receives the name and a line feed at once, and then an echo of what it sends; the reply to a datagram
/// is the name.
#[derive(Debug)]
pub struct EchoServer {
    address: SocketAddr,
    _threads: Background,
}

#[derive(Debug)]
struct Shared {
    name: String,
    shows_source: bool,
}

impl Shared {
    fn reply(&self, source: IpAddr) -> String {
        if self.shows_source { format!("{} {source}", self.name) } else { self.name.clone() }
    }
}

impl EchoServer {
    /// Starts a server in the network namespace of the calling thread; fails if the address cannot be bound.
    pub fn start(name: &str, address: SocketAddr) -> Result<Self> {
        Self::start_with(name, address, false)
    }

    /// Starts a server whose replies have the source address of the request after the name and a space.
    pub fn start_showing_source(name: &str, address: SocketAddr) -> Result<Self> {
        Self::start_with(name, address, true)
    }

    fn start_with(name: &str, address: SocketAddr, shows_source: bool) -> Result<Self> {
        let tcp =
            TcpListener::bind(address).with_context(|| format!("{name} cannot listen on TCP {address}"))?;
        tcp.set_nonblocking(true)?;
        // If the port is 0, UDP gets the port that the kernel chose for TCP.
        let address = tcp.local_addr()?;
        let udp =
            UdpSocket::bind(address).with_context(|| format!("{name} cannot listen on UDP {address}"))?;
        udp.set_read_timeout(Some(Duration::from_millis(POLL_INTERVAL_MS.into())))?;

        let shared = Arc::new(Shared { name: name.to_owned(), shows_source });
        let mut threads = Background::default();
        let [of_tcp, of_udp] = [(); 2].map(|()| Arc::clone(&shared));
        threads.spawn(move |stop| serve_tcp(&of_tcp, &tcp, stop));
        threads.spawn(move |stop| serve_udp(&of_udp, &udp, stop));
        Ok(Self { address, _threads: threads })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

/// One thread for the listener and all its connections: most live for microseconds, for which a thread is expensive.
fn serve_tcp(shared: &Shared, listener: &TcpListener, stop: &AtomicBool) {
    let mut streams: Vec<TcpStream> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let mut polled = vec![PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        polled.extend(streams.iter().map(|it| PollFd::new(it.as_fd(), PollFlags::POLLIN)));
        if poll(&mut polled, PollTimeout::from(POLL_INTERVAL_MS)).unwrap_or(0) <= 0 {
            continue;
        }
        let ready: Vec<bool> = polled.iter().map(|it| it.any().unwrap_or(true)).collect();
        let mut ready_streams = ready.iter().skip(1);
        streams.retain_mut(|stream| !ready_streams.next().copied().unwrap_or(false) || echo(stream));
        while let Ok((mut stream, from)) = listener.accept() {
            let greeting = shared.reply(from.ip()) + "\n";
            let kept = stream.set_nonblocking(true).and_then(|()| stream.write_all(greeting.as_bytes()));
            if kept.is_ok() {
                streams.push(stream);
            }
        }
    }
}

/// Sends back what was received. `false` at the end of the connection.
fn echo(stream: &mut TcpStream) -> bool {
    let mut part = [0; 4096];
    match stream.read(&mut part) {
        Ok(0) => false,
        Ok(length) => stream.write_all(&part[..length]).is_ok(),
        Err(error) => error.kind() == ErrorKind::WouldBlock || error.kind() == ErrorKind::Interrupted,
    }
}

fn serve_udp(shared: &Shared, socket: &UdpSocket, stop: &AtomicBool) {
    let mut part = [0; 4096];
    while !stop.load(Ordering::Relaxed) {
        let received: io::Result<_> = socket.recv_from(&mut part);
        if let Ok((_, from)) = received {
            // The client may have closed its socket.
            let _ = socket.send_to(shared.reply(from.ip()).as_bytes(), from);
        }
    }
}
