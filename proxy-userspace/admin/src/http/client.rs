//! Queries another process of this program: its status at a Unix socket, its readiness over TCP.
//!
//! Invariant: the server is not trusted. Timeouts and what is buffered are bounded, and unexpected responses are rejected.

use std::{
    io::{self, BufRead as _, BufReader, Read as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use crate::{
    Status, TraceFilters,
    pages::{explain, trace},
};

/// For each system call.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Until a trace has begun: the kernel verifies the programs first, in about a second on an ordinary machine.
const TRACE_TIMEOUT: Duration = Duration::from_secs(300);
/// Maximum size of the head of a response, and of a refusal.
const MAX_HEAD: u64 = 16 << 10;
/// Maximum size of a response that is buffered; large pages are read as they come.
const MAX_BUFFERED: u64 = 16 << 20;

/// What listens at a Unix socket.
#[derive(Debug)]
pub enum Listener {
    /// A process of this program.
    Proxy(Box<Status>),
    Foreign,
    None,
}

/// Queries the status of the process that serves its status pages at this Unix socket.
///
/// # Errors
///
/// If this user may not connect to it.
pub fn query_status(socket: &Path) -> io::Result<Listener> {
    match get(socket, "/status") {
        Ok(body) => {
            Ok(serde_json::from_reader(body).map_or(Listener::Foreign, |it| Listener::Proxy(Box::new(it))))
        }
        Err(error) => match error.kind() {
            io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => Ok(Listener::None),
            io::ErrorKind::PermissionDenied => Err(error),
            _ => Ok(Listener::Foreign),
        },
    }
}

/// Queries the readiness of the process that serves its health pages at this address; the error lists the failed checks.
/// `None` if no process of this program responds.
pub fn query_readiness(address: SocketAddr) -> Option<Result<(), String>> {
    let (code, body) = page(address, "/readyz").ok()?;
    // kube-proxy has no such page, and other programs have no check with this name.
    let is_ours = body.lines().any(|it| it.starts_with("[+]state ") || it.starts_with("[-]state "));
    let failed = body.lines().filter_map(|it| it.strip_prefix("[-]")).collect::<Vec<_>>().join("; ");
    is_ours.then_some(if code == 200 { Ok(()) } else { Err(failed) })
}

/// Asks the process that serves its status pages at this Unix socket to explain a connection: an answer in JSON, or what is
/// wrong with the question.
///
/// # Errors
///
/// If the connection fails, or what listens there cannot answer.
pub fn query_explanation(socket: &Path, words: &[String]) -> io::Result<Result<String, String>> {
    match buffered(ask(socket, &explain::path(words), TIMEOUT)?)? {
        (200, body) => Ok(Ok(body)),
        (400, body) => Ok(Err(body.trim_end().to_owned())),
        (501 | 503, body) => Err(io::Error::other(body.trim_end().to_owned())),
        _ => Err(unexpected_response()),
    }
}

/// Traces at the process that serves its status pages at this Unix socket: lines of JSON, or why it refuses. Reading them
/// takes as long as the trace.
///
/// # Errors
///
/// If the connection fails, or what listens there cannot trace.
pub fn query_trace(
    socket: &Path,
    filters: &TraceFilters,
) -> io::Result<Result<BufReader<UnixStream>, String>> {
    let mut reader = ask(socket, &trace::path(filters), TRACE_TIMEOUT)?;
    match read_status(&mut reader)? {
        200 => Ok(Ok(reader)),
        400 => {
            let mut text = String::new();
            reader.take(MAX_HEAD).read_to_string(&mut text)?;
            Ok(Err(text.trim_end().to_owned()))
        }
        501 => Err(io::Error::other("it has no programs; ask `run` or `agent` with an eBPF backend")),
        _ => Err(unexpected_response()),
    }
}

/// Gets a page from a Unix socket, as it comes: its size is not bounded.
///
/// # Errors
///
/// If the connection fails or the status is not 200.
pub fn get(socket: &Path, path: &str) -> io::Result<BufReader<UnixStream>> {
    let mut body = ask(socket, path, TIMEOUT)?;
    match read_status(&mut body)? {
        200 => Ok(body),
        _ => Err(unexpected_response()),
    }
}

fn ask(socket: &Path, path: &str, read_timeout: Duration) -> io::Result<BufReader<UnixStream>> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(read_timeout))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    send(&mut stream, "localhost", path)?;
    Ok(BufReader::new(stream))
}

fn unexpected_response() -> io::Error {
    io::Error::other("unexpected response")
}

/// The status and the body of a page of any program over TCP.
///
/// # Errors
///
/// If nothing listens there, or the response is not HTTP.
pub fn page(address: SocketAddr, path: &str) -> io::Result<(u16, String)> {
    // A server at the unspecified address is queried over loopback.
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    let address = SocketAddr::new(ip, address.port());
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    send(&mut stream, &address.to_string(), path)?;
    buffered(BufReader::new(stream))
}

/// The status and the body of a response.
fn buffered(mut reader: impl io::BufRead) -> io::Result<(u16, String)> {
    let status = read_status(&mut reader)?;
    let mut body = String::new();
    reader.take(MAX_BUFFERED).read_to_string(&mut body)?;
    Ok((status, body))
}

fn send(stream: &mut impl io::Write, host: &str, path: &str) -> io::Result<()> {
    // HTTP/1.0: the body is not chunked, and ends with the connection.
    // In one write: a server may answer, and close, before it has read everything.
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n").as_bytes())
}

/// Reads the head of a response, and returns the status in it.
fn read_status(reader: &mut impl io::BufRead) -> io::Result<u16> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        let rest = MAX_HEAD.saturating_sub(head.len() as u64);
        if reader.by_ref().take(rest).read_line(&mut head)? == 0 {
            return Err(unexpected_response());
        }
    }
    head.split(' ').nth(1).and_then(|it| it.parse().ok()).ok_or_else(unexpected_response)
}
