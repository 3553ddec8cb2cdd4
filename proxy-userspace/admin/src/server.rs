//! Serves pages over HTTP.
//!
//! Invariant: an address that cannot be bound affects nothing else. The error is logged, bind is retried until it succeeds,
//! and slow or silent clients are disconnected.

use std::{
    convert::Infallible,
    fmt, io,
    net::{Ipv6Addr, SocketAddr},
    os::fd::AsFd as _,
    sync::Arc,
    time::Duration,
};

use http_body_util::Full;
use hyper::{
    Request, Response,
    body::{Bytes, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use nix::sys::socket::{setsockopt, sockopt::Ipv6V6Only};
use tokio::{
    net::{TcpListener, TcpSocket},
    sync::Semaphore,
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{admin::Admin, handlers::PageGroup};

/// Delay before the first and between later retries of bind.
const BACKOFF_MIN: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// Maximum number of clients of one address.
const MAX_CLIENTS: usize = 128;
/// Maximum number of connections that wait for accept.
const BACKLOG: u32 = 256;
/// Maximum time until a client has sent the head of a request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum lifetime of a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum size of the head of a request.
const MAX_HEAD: usize = 16 << 10;
/// Delay after a failed accept, as when there are no file descriptors left.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// Running servers; dropping it stops them.
pub type Servers = JoinSet<()>;

/// Starts to serve the pages at each address. Must be called within a tokio runtime.
pub fn serve_pages(admin: &Admin, addresses: impl IntoIterator<Item = (PageGroup, SocketAddr)>) -> Servers {
    addresses.into_iter().map(|(pages, address)| serve(admin.clone(), pages, address)).collect()
}

async fn serve(admin: Admin, pages: PageGroup, address: SocketAddr) {
    let listener = bind_with_retry(address, |error, retry_in| {
        tracing::error!(
            "cannot serve the {pages} pages at {address}: {error}; {}, or choose another {}; Services are not \
             affected; retrying in {retry_in:?}",
            bind_remedy(&error),
            pages.flag()
        );
    })
    .await;
    if let Ok(address) = listener.local_addr() {
        tracing::info!("serving the {pages} pages at http://{address}: {}", pages.paths().join(", "));
    }
    let admin = &admin;
    accept(&listener, pages, move || {
        let admin = admin.clone();
        move |request| {
            let admin = admin.clone();
            async move { admin.respond(pages, &request).await }
        }
    })
    .await;
}

/// Serves all clients until it is dropped; each connection gets a handler of its own. `name` is for the log.
pub(crate) async fn accept<H, F>(listener: &TcpListener, name: impl fmt::Display, new_handler: impl Fn() -> H)
where
    H: Fn(Request<Incoming>) -> F + Send + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send,
{
    let permits = Arc::new(Semaphore::new(MAX_CLIENTS));
    let mut clients = JoinSet::new();
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
        // Reap finished tasks.
        while clients.try_join_next().is_some() {}
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Most errors are a client's; without a delay, an error of this process would cause a busy loop.
                tracing::debug!("{name}: accept: {error}");
                sleep(ACCEPT_BACKOFF).await;
                continue;
            }
        };
        let handler = new_handler();
        clients.spawn(async move {
            let service = service_fn(move |request| {
                let response = handler(request);
                async move { Ok::<_, Infallible>(response.await) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .max_buf_size(MAX_HEAD)
                .serve_connection(TokioIo::new(stream), service);
            // A connection error concerns only its client.
            let _ = timeout(CONNECTION_TIMEOUT, connection).await;
            drop(permit);
        });
    }
}

/// Binds the address, with backoff; reports each error with the delay until the next attempt.
pub(crate) async fn bind_with_retry(
    address: SocketAddr,
    mut on_error: impl FnMut(io::Error, Duration),
) -> TcpListener {
    let mut delay = BACKOFF_MIN;
    loop {
        match bind(address) {
            Ok(listener) => return listener,
            Err(error) => on_error(error, delay),
        }
        sleep(delay).await;
        delay = (delay * 2).min(BACKOFF_MAX);
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
fn bind(address: SocketAddr) -> io::Result<TcpListener> {
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
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

#[cfg(test)]
mod tests;
