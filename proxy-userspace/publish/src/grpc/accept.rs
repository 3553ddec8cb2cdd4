//! Accepts connections and completes their TLS handshakes.
//!
//! Invariant: no client waits for another.
//! Handshakes run concurrently, each with a timeout, and accepting continues after every error.

use std::{
    future::Future as _,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    task::JoinSet,
    time::{Instant, Sleep, sleep},
};
use tokio_rustls::rustls;
use tokio_stream::Stream;
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
pub(super) struct Incoming {
    listener: Listener,
    backoff: Option<Pin<Box<Sleep>>>,
    handshakes: JoinSet<Result<Connection, HandshakeError>>,
    /// The last failure that was logged as a warning, and when.
    last_warning: Option<(String, Instant)>,
}

struct HandshakeError {
    client: SocketAddr,
    reason: String,
}

impl Incoming {
    pub(super) fn new(listener: Listener) -> Self {
        Self { listener, backoff: None, handshakes: JoinSet::new(), last_warning: None }
    }

    /// The next connection whose handshake is complete.
    fn poll_handshakes(&mut self, cx: &mut Context<'_>) -> Poll<Connection> {
        while let Poll::Ready(Some(result)) = self.handshakes.poll_join_next(cx) {
            match result {
                Ok(Ok(connection)) => return Poll::Ready(connection),
                Ok(Err(error)) => self.log(error),
                Err(error) => tracing::warn!("{}: TLS handshake: {error}", self.listener.address()),
            }
        }
        Poll::Pending
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

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Poll::Ready(connection) = self.poll_handshakes(cx) {
                return Poll::Ready(Some(Ok(connection)));
            }
            if self.handshakes.len() >= MAX_HANDSHAKES {
                return Poll::Pending;
            }
            if let Some(backoff) = &mut self.backoff {
                ready!(backoff.as_mut().poll(cx));
                self.backoff = None;
            }
            match ready!(self.listener.poll_accept(cx)) {
                Ok(Accepted::Unix(stream)) => {
                    return Poll::Ready(Some(Ok(Connection::new(stream, Peer::LOCAL))));
                }
                Ok(Accepted::Tcp(stream, client)) => {
                    if let Err(error) = stream.set_nodelay(true) {
                        tracing::debug!(%error, "setsockopt(TCP_NODELAY)");
                    }
                    let Some(tls) = self.listener.tls().cloned() else {
                        return Poll::Ready(Some(Ok(Connection::new(stream, Peer::LOCAL))));
                    };
                    self.handshakes.spawn(handshake(tls, stream, client));
                }
                Err(error) => {
                    let address = self.listener.address();
                    tracing::warn!("{address}: accept failed: {error}; retrying in {ACCEPT_BACKOFF:?}");
                    self.backoff = Some(Box::pin(sleep(ACCEPT_BACKOFF)));
                }
            }
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
