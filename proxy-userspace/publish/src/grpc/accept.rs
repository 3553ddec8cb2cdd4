//! Accepts connections and completes their TLS handshakes.
//!
//! Invariant: no client waits for another.
//! Handshakes run concurrently, each with a timeout, and accepting continues after every error.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::stream::{self, Stream};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_rustls::rustls;
use tonic::transport::server::Connected;

use super::{
    authz::Peer,
    listen::{Accepted, Listener},
    tls::ServerTls,
};

/// How long to wait after an error of accept(2), such as EMFILE.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);
/// How many handshakes run concurrently; further connections are accepted when one has ended.
const MAX_HANDSHAKES: usize = 1024;
/// How long further handshakes that fail for the same reason are not logged as warnings.
const LOG_DEDUP_INTERVAL: Duration = Duration::from_secs(60);

/// The incoming connections of a listener.
pub(super) fn incoming(listener: Listener) -> impl Stream<Item = io::Result<Connection>> {
    let acceptor =
        Acceptor { listener, handshakes: JoinSet::new(), accept_at: Instant::now(), last_warning: None };
    stream::unfold(acceptor, async |mut it| Some((Ok(it.next().await), it)))
}

struct Acceptor {
    listener: Listener,
    handshakes: JoinSet<Result<Connection, HandshakeError>>,
    /// Before that, after a failed accept, only handshakes go on.
    accept_at: Instant,
    /// The last failure that was logged as a warning, and when.
    last_warning: Option<(String, Instant)>,
}

struct HandshakeError {
    client: SocketAddr,
    reason: String,
}

impl Acceptor {
    /// The next connection, whose handshake is complete.
    async fn next(&mut self) -> Connection {
        loop {
            let accept = async {
                sleep_until(self.accept_at).await;
                self.listener.accept().await
            };
            let accepted = tokio::select! {
                Some(result) = self.handshakes.join_next() => {
                    match result {
                        Ok(Ok(connection)) => return connection,
                        Ok(Err(error)) => self.log(error),
                        Err(error) => tracing::warn!("{}: TLS handshake: {error}", self.listener.address()),
                    }
                    continue;
                }
                accepted = accept, if self.handshakes.len() < MAX_HANDSHAKES => accepted,
            };
            match (accepted, self.listener.tls()) {
                (Ok(Accepted::Unix(stream)), _) => return Connection::new(stream, Peer::LOCAL),
                (Ok(Accepted::Tcp(stream, client)), tls) => {
                    if let Err(error) = stream.set_nodelay(true) {
                        tracing::debug!(%error, "setsockopt(TCP_NODELAY)");
                    }
                    match tls {
                        None => return Connection::new(stream, Peer::LOCAL),
                        Some(tls) => drop(self.handshakes.spawn(handshake(Arc::clone(tls), stream, client))),
                    }
                }
                (Err(error), _) => {
                    let address = self.listener.address();
                    tracing::warn!("{address}: accept failed: {error}; retrying in {ACCEPT_BACKOFF:?}");
                    self.accept_at = Instant::now() + ACCEPT_BACKOFF;
                }
            }
        }
    }

    fn log(&mut self, HandshakeError { client, reason }: HandshakeError) {
        let address = self.listener.address();
        let is_repeated = self
            .last_warning
            .as_ref()
            .is_some_and(|(last, at)| *last == reason && at.elapsed() < LOG_DEDUP_INTERVAL);
        if is_repeated {
            tracing::debug!("{address}: TLS handshake with {client} failed: {reason}");
        } else {
            tracing::warn!("{address}: TLS handshake with {client} failed: {reason}");
            self.last_warning = Some((reason, Instant::now()));
        }
    }
}

async fn handshake(
    tls: Arc<ServerTls>,
    stream: TcpStream,
    client: SocketAddr,
) -> Result<Connection, HandshakeError> {
    match tls.handshake(stream).await {
        Ok((stream, peer)) => Ok(Connection::new(stream, peer)),
        Err(error) => Err(HandshakeError { client, reason: reason(&error) }),
    }
}

fn reason(error: &io::Error) -> String {
    match error.get_ref().and_then(|it| it.downcast_ref()) {
        Some(rustls::Error::InvalidMessage(_)) => format!("{error}: not TLS, or corrupt"),
        _ => error.to_string(),
    }
}

/// The connection of a client.
pub(super) struct Connection {
    stream: Box<dyn ByteStream>,
    peer: Peer,
}

trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

impl Connection {
    fn new(stream: impl ByteStream + 'static, peer: Peer) -> Self {
        Self { stream: Box::new(stream), peer }
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
