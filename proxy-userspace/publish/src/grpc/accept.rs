//! Connections, as clients make them.
//!
//! The one rule: nobody waits for another.
//! Handshakes run beside each other, each has its time, and accepting goes on after every error.

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
    net::{TcpStream, UnixStream},
    task::JoinSet,
    time::{Instant, Sleep, sleep},
};
use tokio_rustls::{rustls, server::TlsStream};
use tokio_stream::Stream;
use tonic::transport::server::Connected;

use super::{
    authz::Peer,
    listen::{Accepted, Listener},
    tls::ServerTls,
};

/// How long to wait when there are no file descriptors left.
const BREATH: Duration = Duration::from_millis(100);
/// How many handshakes run at a time; who comes then is accepted when one is done, or its time is over.
const MOST_HANDSHAKES: usize = 1024;
/// How long the log keeps silent about further handshakes that failed for the same reason.
const SILENCE: Duration = Duration::from_secs(60);

/// The clients of a listener as they come; it goes on after an error.
pub(super) struct Clients {
    listener: Listener,
    breath: Option<Pin<Box<Sleep>>>,
    handshakes: JoinSet<Result<Connection, Failed>>,
    /// The failure that the log spoke of last, and when.
    said: Option<(String, Instant)>,
}

/// A handshake that came to nothing.
struct Failed {
    client: SocketAddr,
    reason: String,
}

impl Clients {
    pub(super) fn new(listener: Listener) -> Self {
        Self { listener, breath: None, handshakes: JoinSet::new(), said: None }
    }

    /// The next client whose handshake is done.
    fn poll_done(&mut self, cx: &mut Context<'_>) -> Poll<Connection> {
        while let Poll::Ready(Some(done)) = self.handshakes.poll_join_next(cx) {
            match done {
                Ok(Ok(connection)) => return Poll::Ready(connection),
                Ok(Err(failed)) => self.say(failed),
                Err(error) => tracing::warn!("{}: a handshake: {error}", self.listener.address()),
            }
        }
        Poll::Pending
    }

    fn say(&mut self, Failed { client, reason }: Failed) {
        let address = self.listener.address();
        let is_known = self.said.as_ref().is_some_and(|(said, at)| *said == reason && at.elapsed() < SILENCE);
        if is_known {
            tracing::debug!("{address}: refused {client}: {reason}");
        } else {
            tracing::warn!("{address}: refused {client}: {reason}");
            self.said = Some((reason, Instant::now()));
        }
    }
}

impl Stream for Clients {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Poll::Ready(connection) = self.poll_done(cx) {
                return Poll::Ready(Some(Ok(connection)));
            }
            if self.handshakes.len() >= MOST_HANDSHAKES {
                return Poll::Pending;
            }
            if let Some(breath) = &mut self.breath {
                ready!(breath.as_mut().poll(cx));
                self.breath = None;
            }
            match ready!(self.listener.poll_accept(cx)) {
                Ok(Accepted::Unix(stream)) => return Poll::Ready(Some(Ok(Connection::Unix(stream)))),
                Ok(Accepted::Tcp(stream, client)) => {
                    if let Err(error) = stream.set_nodelay(true) {
                        tracing::debug!(%error, "setsockopt(TCP_NODELAY)");
                    }
                    let Some(tls) = self.listener.tls().cloned() else {
                        return Poll::Ready(Some(Ok(Connection::Tcp(stream))));
                    };
                    self.handshakes.spawn(handshake(tls, stream, client));
                }
                Err(error) => {
                    tracing::warn!(
                        "{}: accept: {error}; trying again in {BREATH:?}",
                        self.listener.address()
                    );
                    self.breath = Some(Box::pin(sleep(BREATH)));
                }
            }
        }
    }
}

async fn handshake(tls: Arc<ServerTls>, stream: TcpStream, client: SocketAddr) -> Result<Connection, Failed> {
    match tls.handshake(stream).await {
        Ok((stream, peer)) => Ok(Connection::Tls { stream: Box::new(stream), peer }),
        Err(error) => Err(Failed { client, reason: reason(&error) }),
    }
}

fn reason(error: &io::Error) -> String {
    match error.get_ref().and_then(|it| it.downcast_ref()) {
        Some(rustls::Error::InvalidMessage(_)) => format!("{error}: that is no TLS, or broken"),
        _ => error.to_string(),
    }
}

/// A client's connection.
#[derive(Debug)]
pub(super) enum Connection {
    Unix(UnixStream),
    Tcp(TcpStream),
    Tls { stream: Box<TlsStream<TcpStream>>, peer: Peer },
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        match self {
            Self::Unix(_) | Self::Tcp(_) => Peer::LOCAL,
            Self::Tls { peer, .. } => peer.clone(),
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Unix(it) => Pin::new(it).poll_read(cx, buf),
            Self::Tcp(it) => Pin::new(it).poll_read(cx, buf),
            Self::Tls { stream, .. } => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Unix(it) => Pin::new(it).poll_write(cx, buf),
            Self::Tcp(it) => Pin::new(it).poll_write(cx, buf),
            Self::Tls { stream, .. } => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Unix(it) => Pin::new(it).poll_flush(cx),
            Self::Tcp(it) => Pin::new(it).poll_flush(cx),
            Self::Tls { stream, .. } => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Unix(it) => Pin::new(it).poll_shutdown(cx),
            Self::Tcp(it) => Pin::new(it).poll_shutdown(cx),
            Self::Tls { stream, .. } => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
