//! Serves pages over HTTP at an address.
//!
//! The one rule: an address that cannot be had costs nobody else anything.
//! It is named, and asked for again until it can be had; clients that are slow or silent are cut off.

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

use crate::{Admin, Site};

/// How long to wait before an address that could not be had is asked for again: at first, and at most.
pub(crate) const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// How many may be connected at a time, to each address.
const CLIENTS: usize = 128;
/// How many may wait to be accepted.
const BACKLOG: u32 = 256;
/// How long a client may take to say what it wants, and how long it may stay.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// The longest head of a request.
const LONGEST_HEAD: usize = 16 << 10;
/// How long to wait when there are no file descriptors left.
const BREATH: Duration = Duration::from_millis(100);

/// Something to be served somewhere.
#[derive(Clone, Copy, Debug)]
pub struct Endpoint {
    /// The pages.
    pub site: Site,
    /// Where.
    pub address: SocketAddr,
    /// The flag that says where, for the log.
    pub flag: &'static str,
}

/// What serves while it is alive.
#[derive(Debug)]
pub struct Servers {
    _tasks: JoinSet<()>,
}

impl Servers {
    /// Begins to serve. Must be called within a tokio runtime.
    pub fn start(admin: &Admin, endpoints: impl IntoIterator<Item = Endpoint>) -> Self {
        let mut tasks = JoinSet::new();
        for endpoint in endpoints {
            tasks.spawn(serve(admin.clone(), endpoint));
        }
        Self { _tasks: tasks }
    }
}

async fn serve(admin: Admin, endpoint: Endpoint) {
    let Endpoint { site, address, flag } = endpoint;
    let listener = bind_at_last(address, site, flag).await;
    if let Ok(address) = listener.local_addr() {
        tracing::info!("{site} at http://{address}: {}", site.paths().join(", "));
    }
    let admin = &admin;
    accept(&listener, site, move || {
        let admin = admin.clone();
        move |request| {
            let admin = admin.clone();
            async move { admin.answer(site, &request).await }
        }
    })
    .await;
}

/// Answers whoever comes, for ever; each client has an answerer of its own.
pub(crate) async fn accept<A, F>(listener: &TcpListener, what: impl fmt::Display, answerer: impl Fn() -> A)
where
    A: Fn(Request<Incoming>) -> F + Send + 'static,
    F: Future<Output = Response<Full<Bytes>>> + Send,
{
    let places = Arc::new(Semaphore::new(CLIENTS));
    let mut clients = JoinSet::new();
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        // What has ended is forgotten.
        while clients.try_join_next().is_some() {}
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Most of these are the client's; without a pause, those that are ours would keep a CPU busy.
                tracing::debug!("{what}: accept: {error}");
                sleep(BREATH).await;
                continue;
            }
        };
        let answer = answerer();
        clients.spawn(async move {
            let answer = service_fn(move |request| {
                let answer = answer(request);
                async move { Ok::<_, Infallible>(answer.await) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(PATIENCE.0)
                .max_buf_size(LONGEST_HEAD)
                .serve_connection(TokioIo::new(stream), answer);
            // How it ends is the client's business.
            let _ = timeout(PATIENCE.1, connection).await;
            drop(place);
        });
    }
}

/// Listens at the address, as soon as that can be had.
async fn bind_at_last(address: SocketAddr, site: Site, flag: &str) -> TcpListener {
    let mut pause = PAUSE.0;
    loop {
        match bind(address) {
            Ok(listener) => return listener,
            Err(error) => {
                let remedy = remedy(&error);
                tracing::error!(
                    "{site} cannot be served at {address}: {error}; {remedy}, or choose another --{flag}; \
                     next try in {pause:?}"
                );
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE.1);
    }
}

pub(crate) fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "end whoever listens there (`ss -ltnp` shows who; kube-proxy perhaps)",
        io::ErrorKind::AddrNotAvailable => "give this host that address",
        io::ErrorKind::PermissionDenied => "a port below 1024 needs CAP_NET_BIND_SERVICE",
        _ => "see to it that it can be listened at",
    }
}

/// Listens at an address; at all addresses of both families if it is the unspecified one of either, as Go does.
pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    if address.ip().is_unspecified() {
        let all = SocketAddr::from((Ipv6Addr::UNSPECIFIED, address.port()));
        match listen(all, false) {
            // There is no IPv6 here.
            Err(error) if is_without_ipv6(&error) && address.is_ipv4() => {}
            result => return result,
        }
    }
    listen(address, true)
}

fn is_without_ipv6(error: &io::Error) -> bool {
    // EAFNOSUPPORT where the kernel has none, EADDRNOTAVAIL where it is switched off.
    error.raw_os_error() == Some(nix::errno::Errno::EAFNOSUPPORT as i32)
        || error.kind() == io::ErrorKind::AddrNotAvailable
}

fn listen(address: SocketAddr, only_own_family: bool) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => {
            let socket = TcpSocket::new_v6()?;
            setsockopt(&socket.as_fd(), Ipv6V6Only, &only_own_family)?;
            socket
        }
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

#[cfg(test)]
mod tests;
