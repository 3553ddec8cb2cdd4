//! Clients of an [`EchoServer`](crate::EchoServer): one request, or one long-lived connection.
//!
//! Requests end within [`REQUEST_TIMEOUT`] and leave no port in TIME_WAIT. Errors are the system call's, unless stated otherwise.

use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    time::{Duration, Instant},
};

use nix::{
    libc::{EDESTADDRREQ, linger},
    sys::socket::{setsockopt, sockopt},
};

use crate::scaled;

/// How long a request may take: only a hang takes as long.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// After what time a request is taken for one without a reply.
const UNANSWERED: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Tcp,
    Udp,
    /// `sendto` and `recvfrom` on an unconnected UDP socket; the reply must come from the address of the request.
    UdpUnconnected,
}

impl Transport {
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::UdpUnconnected];
}

/// Requests the name of the server at `address`; [`io::ErrorKind::InvalidData`] for an invalid reply.
pub fn request(transport: Transport, address: SocketAddr) -> io::Result<String> {
    request_within(scaled(REQUEST_TIMEOUT), transport, address)
}

/// Sends a request that should get no reply, and waits two seconds for it, on any machine.
pub fn request_unanswered(transport: Transport, address: SocketAddr) -> io::Result<String> {
    request_within(UNANSWERED, transport, address)
}

fn request_within(limit: Duration, transport: Transport, address: SocketAddr) -> io::Result<String> {
    match transport {
        Transport::Tcp => Ok(EchoConnection::connect_within(limit, address)?.name),
        Transport::Udp => retry_while_terminated(|| {
            let socket = udp_socket_with(limit, address)?;
            socket.connect(address)?;
            exchange_connected(&socket)
        }),
        Transport::UdpUnconnected => {
            let (name, from) = exchange(&udp_socket_with(limit, address)?, address)?;
            if (from.ip(), from.port()) != (address.ip(), address.port()) {
                let text = format!("the reply to a request to {address} came from {from}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            Ok(name)
        }
    }
}

/// Repeats a request whose connected UDP socket the proxy terminates meanwhile because its endpoint is gone. A program
/// sees ECONNABORTED, or EDESTADDRREQ from the next send.
pub fn retry_while_terminated<T>(mut request: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let is_terminated = |error: &io::Error| {
        error.kind() == io::ErrorKind::ConnectionAborted || error.raw_os_error() == Some(EDESTADDRREQ)
    };
    let begin = Instant::now();
    loop {
        match request() {
            Err(error) if is_terminated(&error) && begin.elapsed() < scaled(REQUEST_TIMEOUT) => {}
            result => return result,
        }
    }
}

/// An unconnected UDP socket of an address' family, with [`REQUEST_TIMEOUT`] (scaled) as its read timeout.
pub fn udp_socket(for_address: SocketAddr) -> io::Result<UdpSocket> {
    udp_socket_with(scaled(REQUEST_TIMEOUT), for_address)
}

/// A UDP socket that is connected to an address, with the read timeout of [`udp_socket`].
pub fn connected_udp_socket(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = udp_socket(address)?;
    socket.connect(address)?;
    Ok(socket)
}

/// A UDP socket at a source address, with the read timeout of [`udp_socket`].
pub fn udp_socket_at(source: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(source)?;
    socket.set_read_timeout(Some(scaled(REQUEST_TIMEOUT)))?;
    Ok(socket)
}

fn udp_socket_with(limit: Duration, for_address: SocketAddr) -> io::Result<UdpSocket> {
    let any = match for_address {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let socket = UdpSocket::bind(any)?;
    socket.set_read_timeout(Some(limit))?;
    Ok(socket)
}

/// Sends a request with `sendto`: the server's name, and the source of the reply.
pub fn exchange(socket: &UdpSocket, address: SocketAddr) -> io::Result<(String, SocketAddr)> {
    socket.send_to(b"who?", address)?;
    receive(socket)
}

/// Sends a request on a connected socket: the server's name.
pub fn exchange_connected(socket: &UdpSocket) -> io::Result<String> {
    socket.send(b"who?")?;
    Ok(receive(socket)?.0)
}

/// Receives a reply: the server's name, and the source.
pub fn receive(socket: &UdpSocket) -> io::Result<(String, SocketAddr)> {
    let mut reply = [0; 256];
    let (length, from) = socket.recv_from(&mut reply)?;
    let name = str::from_utf8(&reply[..length]);
    let name = name.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok((name.trim_end().to_owned(), from))
}

/// Connects to an address that should refuse: the error, and how long it took; [`io::ErrorKind::AlreadyExists`] if it accepts.
pub fn connect_error(address: SocketAddr) -> io::Result<(io::Error, Duration)> {
    let started = Instant::now();
    match TcpStream::connect(address) {
        Err(error) => Ok((error, started.elapsed())),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("{address} accepts"))),
    }
}

/// A long-lived TCP connection to an echo server.
#[derive(Debug)]
pub struct EchoConnection {
    stream: BufReader<TcpStream>,
    name: String,
}

impl EchoConnection {
    /// Connects and reads the server's name.
    pub fn connect(address: SocketAddr) -> io::Result<Self> {
        Self::connect_within(scaled(REQUEST_TIMEOUT), address)
    }

    fn connect_within(limit: Duration, address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, limit)?;
        // No TIME_WAIT, so that no load runs out of ports.
        reset_on_close(&stream)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(limit))?;
        // A line is short.
        let mut stream = BufReader::with_capacity(256, stream);
        let name = read_line(&mut stream)?;
        Ok(Self { stream, name })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn stream(&self) -> &TcpStream {
        self.stream.get_ref()
    }

    /// Sends a line and waits for its echo; [`io::ErrorKind::InvalidData`] if something else comes back.
    pub fn ping(&mut self) -> io::Result<()> {
        self.stream.get_mut().write_all(b"still there?\n")?;
        let echo = read_line(&mut self.stream)?;
        if echo != "still there?" {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("echo {echo:?}")));
        }
        Ok(())
    }
}

pub fn reset_on_close(stream: &TcpStream) -> io::Result<()> {
    Ok(setsockopt(stream, sockopt::Linger, &linger { l_onoff: 1, l_linger: 0 })?)
}

/// A line without its line feed.
fn read_line(stream: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut line = String::new();
    stream.read_line(&mut line)?;
    match line.pop() {
        Some('\n') => Ok(line),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
