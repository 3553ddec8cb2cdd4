//! Binds TCP addresses, with retries.
//!
//! Invariant: an address that cannot be bound affects nothing else.

use std::{
    future::ready,
    io,
    net::{Ipv6Addr, SocketAddr},
    os::fd::AsFd as _,
    time::Duration,
};

use nix::sys::socket::{setsockopt, sockopt::Ipv6V6Only};
use tokio::{
    net::{TcpListener, TcpSocket},
    time::sleep,
};

/// How often an address that cannot be bound is tried again: the one who holds it may be another proxy that is about to end.
pub(crate) const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of connections that wait for accept: a burst must not make others wait for the retry of their SYN.
pub(crate) const BACKLOG: u32 = 4096;
/// What the kernel keeps for a client that does not read, and of requests that were not read yet, in bytes.
const BUFFER: u32 = 32 << 10;

/// Binds the address, however often that fails; reports an error once, until there is another one.
pub(crate) async fn bind_with_retry(address: SocketAddr, on_error: impl FnMut(io::Error)) -> TcpListener {
    retry(|| ready(bind(address)), on_error).await
}

/// Tries until it succeeds; reports an error once, until there is another one.
pub(crate) async fn retry<T, E: ToString, F: Future<Output = Result<T, E>>>(
    attempt: impl Fn() -> F,
    mut on_error: impl FnMut(E),
) -> T {
    let mut reported = None;
    loop {
        match attempt().await {
            Ok(it) => return it,
            Err(error) if reported.replace(error.to_string()) != Some(error.to_string()) => on_error(error),
            Err(_) => {}
        }
        sleep(RETRY_INTERVAL).await;
    }
}

pub(crate) fn bind_remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "stop the process that listens there (`ss -ltnp` names it; perhaps kube-proxy)"
        }
        io::ErrorKind::AddrNotAvailable => "assign the address to this host",
        io::ErrorKind::PermissionDenied => "a port below 1024 needs CAP_NET_BIND_SERVICE",
        _ => "make sure that the address can be bound",
    }
}

/// Listens at an address; for the unspecified address of either family at all addresses of both, as Go does.
pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    if address.ip().is_unspecified() {
        let all = SocketAddr::from((Ipv6Addr::UNSPECIFIED, address.port()));
        match listen(all, false) {
            Err(error) if is_without_ipv6(&error) && address.is_ipv4() => {}
            result => return result,
        }
    }
    listen(address, true)
}

fn is_without_ipv6(error: &io::Error) -> bool {
    // EAFNOSUPPORT if the kernel is built without IPv6, EADDRNOTAVAIL if it is disabled.
    error.raw_os_error() == Some(nix::errno::Errno::EAFNOSUPPORT as i32)
        || error.kind() == io::ErrorKind::AddrNotAvailable
}

fn listen(address: SocketAddr, is_v6_only: bool) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => {
            let socket = TcpSocket::new_v6()?;
            setsockopt(&socket.as_fd(), Ipv6V6Only, &is_v6_only)?;
            socket
        }
    };
    socket.set_reuseaddr(true)?;
    // Accepted sockets inherit them.
    socket.set_send_buffer_size(BUFFER)?;
    socket.set_recv_buffer_size(BUFFER)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}
