//! A minimal HTTP client for the pages of the proxy. A request fails if nothing listens there, or the response is not HTTP.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use crate::scaled;

/// The default port of the health pages.
pub const HEALTH_PORT: u16 = 10256;
/// The default port of the metrics pages.
pub const METRICS_PORT: u16 = 10249;
/// The default port of the kubelet's probes, on loopback.
pub const PROBE_PORT: u16 = 10245;
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    pub body: String,
}

pub fn get(address: SocketAddr, path: &str) -> io::Result<Response> {
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(scaled(TIMEOUT)))?;
    request(stream, path)
}

pub fn get_from_socket(socket: &Path, path: &str) -> io::Result<Response> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(scaled(TIMEOUT)))?;
    request(stream, path)
}

fn request(mut stream: impl io::Read + io::Write, path: &str) -> io::Result<Response> {
    // A response of HTTP/1.0 is not in chunks, and the connection ends with it.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let response = || {
        let (head, body) = text.split_once("\r\n\r\n")?;
        let status = head.split(' ').nth(1)?.parse().ok()?;
        Some(Response { status, body: body.to_owned() })
    };
    response().ok_or_else(|| io::Error::other(format!("not an HTTP response: {text:?}")))
}

/// Requests a page of the proxy in this network namespace from its health port.
pub fn health(path: &str) -> io::Result<Response> {
    get((Ipv4Addr::LOCALHOST, HEALTH_PORT).into(), path)
}

/// Requests a health page of the proxy in this network namespace from the port for probes.
pub fn probe(path: &str) -> io::Result<Response> {
    get((Ipv4Addr::LOCALHOST, PROBE_PORT).into(), path)
}

/// The status code of a health page; 0 if there is no response.
pub fn health_status(path: &str) -> u16 {
    health(path).map_or(0, |it| it.status)
}

pub fn is_ready() -> bool {
    health_status("/readyz") == 200
}

/// Requests a page of the proxy in this network namespace from its metrics port.
pub fn metrics(path: &str) -> io::Result<Response> {
    get((Ipv4Addr::LOCALHOST, METRICS_PORT).into(), path)
}

/// The value of a series among the proxy's metrics, if it exists.
pub fn metric(series: &str) -> Option<f64> {
    let text = metrics("/metrics").ok()?.body;
    text.lines().find_map(|it| it.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
}
