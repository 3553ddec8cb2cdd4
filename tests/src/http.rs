//! The least that asks a page over HTTP.

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    time::Duration,
};

/// An answer: its status and its body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// As in 200.
    pub status: u16,
    /// What comes after the head.
    pub body: String,
}

/// Asks for a page.
///
/// # Errors
///
/// If nobody answers there, or with something else than HTTP.
pub fn get(address: SocketAddr, path: &str) -> io::Result<Response> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let answer = || {
        let (head, body) = text.split_once("\r\n\r\n")?;
        let status = head.split(' ').nth(1)?.parse().ok()?;
        Some(Response { status, body: body.to_owned() })
    };
    answer().ok_or_else(|| io::Error::other(format!("not an answer: {text:?}")))
}

/// The value of a sample among the proxy's metrics, if it is there.
#[must_use]
pub fn metric(name: &str) -> Option<f64> {
    let text = get((Ipv4Addr::LOCALHOST, 10249).into(), "/metrics").ok()?.body;
    text.lines().find_map(|it| it.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}
