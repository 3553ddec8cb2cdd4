//! Asks another process of this program how it stands.
//!
//! The one rule: whoever answers may be anybody: nothing is waited for long, and nothing is believed that does not fit.

use std::{
    io::{self, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    time::Duration,
};

use crate::Status;

/// How long to wait for each step.
const PATIENCE: Duration = Duration::from_secs(2);
/// The longest answer that is read; rejected items are what makes it long.
const LONGEST: u64 = 16 << 20;

/// Who answers at an address.
#[derive(Debug)]
pub enum Asked {
    /// A process of this program, which stands so.
    Ours(Box<Status>),
    /// Somebody else.
    Other,
    /// Nobody.
    Nobody,
}

/// Asks at the address of a process's metrics.
pub fn ask(address: SocketAddr) -> Asked {
    match get(address, "/status") {
        Ok(body) => serde_json::from_str(&body).map_or(Asked::Other, |it| Asked::Ours(Box::new(it))),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Asked::Nobody,
        Err(_) => Asked::Other,
    }
}

/// Asks at the address of a process's health whether it is ready: nothing, or what is missing. `None` if whoever answers
/// there, if anybody does, is no process of this program.
pub fn is_ready(address: SocketAddr) -> Option<Result<(), String>> {
    let (code, body) = page(address, "/readyz").ok()?;
    // kube-proxy has no such page, and others do not ask for this.
    let is_ours = body.lines().any(|it| it.starts_with("[+]state ") || it.starts_with("[-]state "));
    let missing = body.lines().filter_map(|it| it.strip_prefix("[-]")).collect::<Vec<_>>().join("; ");
    is_ours.then_some(if code == 200 { Ok(()) } else { Err(missing) })
}

/// Gets a page.
///
/// # Errors
///
/// If nobody answers, or it is not there.
pub fn get(address: SocketAddr, path: &str) -> io::Result<String> {
    match page(address, path)? {
        (200, body) => Ok(body),
        _ => Err(no_answer()),
    }
}

fn no_answer() -> io::Error {
    io::Error::other("not the answer that was asked for")
}

/// A page, and the status that it comes with.
fn page(address: SocketAddr, path: &str) -> io::Result<(u16, String)> {
    // Who listens at all addresses is asked at the loopback one.
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    let address = SocketAddr::new(ip, address.port());
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // HTTP/1.0: the answer ends with the connection, in one piece.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
    let mut text = String::new();
    stream.take(LONGEST).read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(no_answer)?;
    let status = head.split(' ').nth(1).and_then(|it| it.parse().ok()).ok_or_else(no_answer)?;
    Ok((status, body.to_owned()))
}
