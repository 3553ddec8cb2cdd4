//! Listeners: unix sockets, TCP ports, and connections that the caller accepts.
//!
//! Invariant: only trusted clients can connect.
//! A unix socket has mode 0600 from its creation on, unless its group is trusted, too; a TCP port listens on a loopback address or requires mutual TLS.

use std::{future::pending, io, net::SocketAddr, sync::Arc};

use listeners::{SocketAccess, UnixSocket, UnixSocketError};
use proxy_contract::Target;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, lookup_host},
    sync::mpsc,
};

use super::{authz::Peer, clients::Clients, tls::ServerTls};

const BACKLOG: u32 = 1024;

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error(transparent)]
    Unix(#[from] UnixSocketError),
    /// Other hosts could connect without TLS.
    #[error(
        "{target}: {address} is not a loopback address, so mutual TLS is required; set --tls-cert, --tls-key and \
         --tls-client-ca, or listen on 127.0.0.1, [::1] or unix:///path"
    )]
    NotLoopback {
        /// The requested address.
        target: Target,
        /// The address that it resolves to.
        address: SocketAddr,
    },
    /// The host name resolves to no address.
    #[error("{0}: the host has no address; listen on 127.0.0.1, [::1] or unix:///path")]
    NoAddress(Target),
    #[error("{target}: {call}: {error}")]
    System {
        target: Target,
        call: &'static str,
        #[source]
        error: io::Error,
    },
}

/// An address that clients connect to. When it is dropped, the file of a unix socket is removed.
#[derive(Debug)]
pub struct Listener {
    address: Target,
    kind: Kind,
    pub(crate) clients: Clients,
}

#[derive(Debug)]
enum Kind {
    Unix(UnixSocket),
    Tcp { listener: TcpListener, tls: Option<Arc<ServerTls>> },
    Given(mpsc::Receiver<Box<dyn ByteStream>>),
}

/// A connection of any kind.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

pub(crate) enum Accepted {
    /// Of a client on this host.
    Local(Box<dyn ByteStream>, Peer),
    /// Begins with a handshake.
    Tls(TcpStream, SocketAddr, Arc<ServerTls>),
}

impl Listener {
    /// Listens without TLS. Must be called within a tokio runtime.
    ///
    /// Creates the directory of a unix socket if needed, and replaces a socket without a listening process.
    pub async fn bind(target: &Target) -> Result<Self, ListenError> {
        Self::bind_for(target, None, SocketAccess::default()).await
    }

    /// Listens, with TLS on TCP ports, and with `access` to a unix socket, which needs no TLS.
    pub async fn bind_for(
        target: &Target,
        tls: Option<Arc<ServerTls>>,
        access: SocketAccess,
    ) -> Result<Self, ListenError> {
        match target {
            Target::Unix(path) => {
                let kind = Kind::Unix(UnixSocket::bind(path, BACKLOG, access).await?);
                Ok(Self { address: target.clone(), kind, clients: Clients::default() })
            }
            Target::Tcp { host, port } => tcp(target, host, *port, tls).await,
        }
    }

    /// Serves connections of trusted clients that the caller has accepted, such as at the end of a tunnel or in memory, until
    /// there is no more of their sender; `address` is for the log.
    pub fn given(address: Target, connections: mpsc::Receiver<Box<dyn ByteStream>>) -> Self {
        Self { address, kind: Kind::Given(connections), clients: Clients::default() }
    }

    /// The address, with the actual port if port 0 was requested.
    pub fn address(&self) -> &Target {
        &self.address
    }

    /// Counts its clients with those of other listeners.
    #[must_use]
    pub fn with_clients(self, clients: Clients) -> Self {
        Self { clients, ..self }
    }

    /// The TLS that every connection must use.
    pub(crate) fn tls(&self) -> Option<&Arc<ServerTls>> {
        match &self.kind {
            Kind::Unix(_) | Kind::Given(_) => None,
            Kind::Tcp { tls, .. } => tls.as_ref(),
        }
    }

    /// Cancel safe.
    pub(crate) async fn accept(&mut self) -> io::Result<Accepted> {
        Ok(match &mut self.kind {
            Kind::Unix(socket) => Accepted::Local(Box::new(socket.accept().await?), Peer::Trusted),
            Kind::Tcp { listener, tls } => {
                let (stream, client) = listener.accept().await?;
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "setsockopt(TCP_NODELAY) failed");
                }
                match tls {
                    Some(tls) => Accepted::Tls(stream, client, Arc::clone(tls)),
                    None => Accepted::Local(Box::new(stream), Peer::Host),
                }
            }
            Kind::Given(connections) => match connections.recv().await {
                Some(stream) => Accepted::Local(stream, Peer::Trusted),
                None => pending().await,
            },
        })
    }
}

async fn tcp(
    target: &Target,
    host: &str,
    port: u16,
    tls: Option<Arc<ServerTls>>,
) -> Result<Listener, ListenError> {
    let system = |call| {
        let target = target.clone();
        move |error| ListenError::System { target, call, error }
    };
    let addresses: Vec<_> = lookup_host((host, port)).await.map_err(system("looking up the host"))?.collect();
    let beyond = addresses.iter().find(|it| !it.ip().to_canonical().is_loopback());
    if let (Some(&address), None) = (beyond, &tls) {
        return Err(ListenError::NotLoopback { target: target.clone(), address });
    }
    let Some(address) = addresses.first() else { return Err(ListenError::NoAddress(target.clone())) };
    let listener = TcpListener::bind(address).await.map_err(system("bind"))?;
    let local = listener.local_addr().map_err(system("getsockname"))?;
    let address = Target::Tcp { host: local.ip().to_string(), port: local.port() };
    Ok(Listener { address, kind: Kind::Tcp { listener, tls }, clients: Clients::default() })
}
