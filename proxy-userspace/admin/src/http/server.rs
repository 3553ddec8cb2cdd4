//! Serves pages over HTTP.
//!
//! Invariant: an address that cannot be bound affects nothing else. The error is logged, bind is retried until it succeeds,
//! a new client is always accepted, and slow or silent ones are disconnected.

use std::{
    convert::Infallible,
    fmt::Display,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use hyper::{
    Request, Response,
    body::Incoming,
    header::{CONNECTION, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use listeners::{Connection, Connections, RuntimeThread, SocketAccess, UnixSocket, UnixSocketError};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixStream},
    runtime::Handle,
    task::{JoinSet, yield_now},
    time::{Instant, sleep, sleep_until},
};

use crate::{
    admin::Admin,
    http::PageGroup,
    http::bind::{BACKLOG, bind_remedy, bind_with_retry, retry},
    http::body::Expiry,
    http::body::PageBody,
    ui::UiAddress,
};

/// Maximum time until a client has sent the head of its first request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time from one request to the next: to render and read a response, and to send another request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of requests on a connection: a client may send many at once, and never read.
const MAX_REQUESTS: usize = 8;
const MAX_HEAD: usize = 16 << 10;
/// How many connections are accepted before those that were accepted have their turn.
const MAX_ACCEPTS: u64 = 8;
/// How many pages read the kernel at a time, and one spare.
const MAX_BLOCKING_THREADS: usize = 3;
/// Delay after a failed accept, as when there are no file descriptors left.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(10);

/// The running servers; dropping it stops them.
///
/// They share no thread with the rest of the process, and the probes none with others, so that no client delays
/// them.
#[derive(Debug)]
pub struct Servers {
    probes: RuntimeThread,
    pages: RuntimeThread,
}

impl Servers {
    /// Starts their threads.
    ///
    /// # Errors
    ///
    /// If the process may not have further threads.
    pub fn start() -> io::Result<Self> {
        let start = |name| RuntimeThread::start(name, MAX_BLOCKING_THREADS);
        Ok(Self { probes: start("probes")?, pages: start("pages")? })
    }

    pub fn serve(&self, admin: &Admin, pages: PageGroup, address: SocketAddr) {
        let thread = if pages == PageGroup::Probes { &self.probes } else { &self.pages };
        thread.handle.spawn(serve(admin.clone(), pages, address));
    }

    pub fn serve_at_socket(&self, admin: &Admin, pages: PageGroup, path: &Path) {
        self.pages.handle.spawn(serve_at_socket(admin.clone(), pages, path.to_owned()));
    }

    /// Serves the page for people, and records the timeline that it shows.
    pub fn serve_ui(&self, admin: &Admin, address: &UiAddress) {
        admin.enable_timeline();
        match address {
            UiAddress::Loopback(address) => self.serve(admin, PageGroup::Ui, *address),
            UiAddress::Unix(path) => self.serve_at_socket(admin, PageGroup::Ui, path),
        }
    }

    /// The runtime of all pages but the probes.
    pub fn handle(&self) -> &Handle {
        &self.pages.handle
    }
}

async fn serve(admin: Admin, pages: PageGroup, address: SocketAddr) {
    let listener = bind_with_retry(address, |error| {
        let remedy = format!("{}, or choose another {}", bind_remedy(&error), pages.flag());
        report_failure(pages, &address, &error, &remedy);
    })
    .await;
    let address = listener.local_addr().unwrap_or(address);
    serve_pages(&admin, pages, &listener, &format!("http://{address}")).await;
}

async fn serve_at_socket(admin: Admin, pages: PageGroup, path: PathBuf) {
    let on_error = |error: UnixSocketError| {
        let remedy = format!("a second instance on this node needs another {}", pages.flag());
        report_failure(pages, &path.display(), &error, &remedy);
    };
    let bind = || UnixSocket::bind(&path, BACKLOG, SocketAccess::default());
    let socket = retry(bind, on_error).await;
    serve_pages(&admin, pages, &socket, &format!("unix://{}", path.display())).await;
}

fn report_failure(pages: PageGroup, address: &dyn Display, error: &dyn Display, remedy: &str) {
    let pages = pages.name();
    tracing::warn!(pages, %address, %error, remedy, "cannot serve the pages; retrying, Services are not affected");
}

async fn serve_pages(admin: &Admin, pages: PageGroup, listener: &impl Listener, address: &str) {
    tracing::info!(pages = pages.name(), address, paths = pages.paths().join(" "), "serving pages");
    accept(listener, admin.connections.of(pages), handler(admin, pages)).await;
}

/// Answers requests, one at a time of each connection.
pub(crate) type Handler = Arc<dyn Fn(Request<Incoming>) -> PendingResponse + Send + Sync>;
pub(crate) type PendingResponse = Pin<Box<dyn Future<Output = Response<PageBody>> + Send>>;

fn handler(admin: &Admin, pages: PageGroup) -> Handler {
    let admin = admin.clone();
    Arc::new(move |request| -> PendingResponse {
        let admin = admin.clone();
        Box::pin(async move { admin.respond(pages, &request).await })
    })
}

/// What connections are accepted from.
pub(crate) trait Listener: Sync {
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// A connection, and where it comes from. Cancel safe.
    fn accept(&self) -> impl Future<Output = io::Result<(Self::Stream, IpAddr)>> + Send;
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<(TcpStream, IpAddr)> {
        let (stream, address) = self.accept().await?;
        Ok((stream, address.ip()))
    }
}

impl Listener for UnixSocket {
    type Stream = UnixStream;

    async fn accept(&self) -> io::Result<(UnixStream, IpAddr)> {
        Ok((self.accept().await?, Ipv4Addr::LOCALHOST.into()))
    }
}

/// Serves all clients until it is dropped.
pub(crate) async fn accept(listener: &impl Listener, connections: &Connections, handler: Handler) {
    let mut clients = JoinSet::new();
    for accepted in 1_u64.. {
        // Reap finished tasks.
        while clients.try_join_next().is_some() {}
        // Those that were accepted are served before they are the oldest.
        if accepted.is_multiple_of(MAX_ACCEPTS) {
            yield_now().await;
        }
        match listener.accept().await {
            Ok((stream, source)) => {
                let connection = connections.admit(source).await;
                clients.spawn(serve_client(stream, connection, Arc::clone(&handler)));
            }
            Err(error) => {
                // Most errors are a client's; without a delay, an error of this process would cause a busy loop.
                tracing::debug!(%error, "accept failed");
                if is_out_of_files(&error) {
                    connections.close_one();
                }
                sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
}

fn is_out_of_files(error: &io::Error) -> bool {
    use nix::errno::Errno;
    error.raw_os_error().is_some_and(|it| [Errno::EMFILE, Errno::ENFILE].contains(&Errno::from_raw(it)))
}

/// Serves a client until it disconnects, takes too long, or must make room for another one.
async fn serve_client(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    mut connection: Connection,
    handler: Handler,
) {
    let expiry = Arc::new(Mutex::new(Instant::now() + HEAD_TIMEOUT));
    let renewed = Arc::clone(&expiry);
    let served = AtomicUsize::new(0);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(Expiry(Arc::clone(&renewed)));
        *renewed.lock() = Instant::now() + REQUEST_TIMEOUT;
        let is_last = served.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_REQUESTS;
        let response = handler(request);
        async move {
            // One request at a time of each connection, however many a client has sent.
            yield_now().await;
            let mut response = response.await;
            if is_last {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, Infallible>(response)
        }
    });
    let serving = http1::Builder::new()
        // A head of any request must be complete when the connection expires.
        .header_read_timeout(None)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    let mut serving = pin!(serving);
    loop {
        let expires = *expiry.lock();
        tokio::select! {
            // An error concerns only this client.
            _ = &mut serving => return,
            _ = &mut connection.closing => return,
            () = sleep_until(expires) => {
                if *expiry.lock() <= expires {
                    return;
                }
            }
        }
    }
}

/// Serves a client that is the other end of a stream.
#[cfg(feature = "fuzzing")]
pub(crate) async fn serve_one(
    admin: &Admin,
    pages: PageGroup,
    connections: &Connections,
    stream: impl AsyncRead + AsyncWrite + Unpin,
) {
    let connection = connections.admit(Ipv4Addr::LOCALHOST.into()).await;
    serve_client(stream, connection, handler(admin, pages)).await;
}

#[cfg(test)]
mod tests;
