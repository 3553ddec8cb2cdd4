//! One question to an address, and who answered.
//! The one rule: every question ends within [`LIMIT`], and leaves no port behind that waits.

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    time::{Duration, Instant},
};

use nix::{
    libc::{EDESTADDRREQ, linger},
    sys::socket::{setsockopt, sockopt},
};

use crate::scaled;

/// How long anything may take, on an ordinary machine.
pub const LIMIT: Duration = Duration::from_secs(2);

/// How a question travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// A TCP connection.
    Tcp,
    /// A connected UDP socket.
    Udp,
    /// `sendto` and `recvfrom` on a UDP socket that is not connected; the answer must come from where it was asked.
    UdpUnconnected,
}

/// Asks who serves `address`.
///
/// # Errors
///
/// The system call's, or [`io::ErrorKind::InvalidData`] if the answer is none.
pub fn request(transport: Transport, address: SocketAddr) -> io::Result<String> {
    request_within(scaled(LIMIT), transport, address)
}

/// Asks where nobody should answer. An answer that did come would be there within [`LIMIT`] on any machine.
///
/// # Errors
///
/// As for [`request`].
pub fn request_unanswered(transport: Transport, address: SocketAddr) -> io::Result<String> {
    request_within(LIMIT, transport, address)
}

fn request_within(limit: Duration, transport: Transport, address: SocketAddr) -> io::Result<String> {
    match transport {
        Transport::Tcp => Ok(EchoConnection::connect_within(limit, address)?.name),
        Transport::Udp => retry_while_terminated(|| request_connected(limit, address)),
        Transport::UdpUnconnected => {
            let socket = udp(limit, address)?;
            socket.send_to(b"who?", address)?;
            let mut answer = [0; 256];
            let (length, from) = socket.recv_from(&mut answer)?;
            if (from.ip(), from.port()) != (address.ip(), address.port()) {
                let text = format!("asked {address}, the answer came from {from}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            name(&answer[..length])
        }
    }
}

/// Whether this is what a program gets whose connected UDP socket was ended: a send asks first whether it is connected.
fn is_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ConnectionAborted || error.raw_os_error() == Some(EDESTADDRREQ)
}

/// Asks anew for as long as the endpoint goes meanwhile, as a program does whose connected UDP socket is ended.
///
/// # Errors
///
/// The last one's.
pub fn retry_while_terminated<T>(mut ask: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let begin = Instant::now();
    loop {
        match ask() {
            Err(error) if is_ended(&error) && begin.elapsed() < scaled(LIMIT) => {}
            answer => return answer,
        }
    }
}

fn request_connected(limit: Duration, address: SocketAddr) -> io::Result<String> {
    let socket = udp(limit, address)?;
    socket.connect(address)?;
    socket.send(b"who?")?;
    let mut answer = [0; 256];
    let length = socket.recv(&mut answer)?;
    name(&answer[..length])
}

/// Connects to an address that should refuse: the error and how long it took.
///
/// # Errors
///
/// [`io::ErrorKind::AlreadyExists`] with the answerer's name, if somebody answers.
pub fn connect_error(address: SocketAddr) -> io::Result<(io::Error, Duration)> {
    let started = Instant::now();
    match TcpStream::connect(address) {
        Err(error) => Ok((error, started.elapsed())),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("{address} accepts"))),
    }
}

/// A connection that lasts, to see whether it still works.
#[derive(Debug)]
pub struct EchoConnection {
    stream: TcpStream,
    name: String,
}

impl EchoConnection {
    /// Connects and reads who is there.
    ///
    /// # Errors
    ///
    /// The system call's.
    pub fn connect(address: SocketAddr) -> io::Result<Self> {
        Self::connect_within(scaled(LIMIT), address)
    }

    fn connect_within(limit: Duration, address: SocketAddr) -> io::Result<Self> {
        let mut stream = TcpStream::connect_timeout(&address, limit)?;
        // No TIME_WAIT, so that no load runs out of ports.
        reset_on_close(&stream)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(limit))?;
        let line = read_line(&mut stream)?;
        Ok(Self { name: name(&line)?, stream })
    }

    /// Who accepted.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The connection itself.
    #[must_use]
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends a line and waits for its echo.
    ///
    /// # Errors
    ///
    /// The system call's, or [`io::ErrorKind::InvalidData`] if something else came back.
    pub fn ping(&mut self) -> io::Result<()> {
        self.stream.write_all(b"still there?\n")?;
        let echo = read_line(&mut self.stream)?;
        if echo != b"still there?" {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("echo {echo:?}")));
        }
        Ok(())
    }
}

/// Has the connection end with a reset when it is closed.
///
/// # Errors
///
/// The system call's.
pub fn reset_on_close(stream: &TcpStream) -> io::Result<()> {
    Ok(setsockopt(stream, sockopt::Linger, &linger { l_onoff: 1, l_linger: 0 })?)
}

fn udp(limit: Duration, address: SocketAddr) -> io::Result<UdpSocket> {
    let any = match address {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let socket = UdpSocket::bind(any)?;
    socket.set_read_timeout(Some(limit))?;
    Ok(socket)
}

fn read_line(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut part = [0; 256];
    loop {
        let length = stream.read(&mut part)?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        line.extend_from_slice(&part[..length]);
        if line.ends_with(b"\n") {
            line.pop();
            return Ok(line);
        }
    }
}

fn name(answer: &[u8]) -> io::Result<String> {
    let text =
        std::str::from_utf8(answer).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok(text.trim_end().to_owned())
}
