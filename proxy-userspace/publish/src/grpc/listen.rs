//! Listening sockets: unix sockets and TCP ports.
//!
//! Invariant: only trusted clients can connect.
//! A unix socket has mode 0600 from its creation on; a TCP port listens on a loopback address or requires mutual TLS.

use std::{
    fs, io,
    net::SocketAddr,
    os::{
        fd::AsFd as _,
        unix::fs::{FileTypeExt as _, MetadataExt as _},
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::sys::stat::{Mode, fchmod};
use proxy_contract::Target;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixSocket, UnixStream, lookup_host};

use super::tls::ServerTls;

/// The backlog of listen(2).
const BACKLOG: u32 = 1024;

/// Why an address cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another process listens there.
    #[error("unix://{}: another process listens there; stop it, or choose another address", .0.display())]
    InUse(PathBuf),
    /// The path exists and is not a socket.
    #[error("unix://{}: exists and is not a socket; remove it, or choose another address", .0.display())]
    NotASocket(PathBuf),
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
    /// A system call failed.
    #[error("{target}: {call}: {error}")]
    System {
        /// The requested address.
        target: Target,
        /// The call.
        call: &'static str,
        /// The cause.
        #[source]
        error: io::Error,
    },
}

/// A listening socket. When it is dropped, the file of a unix socket is removed.
#[derive(Debug)]
pub struct Listener {
    address: Target,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Unix { listener: UnixListener, _file: SocketFile },
    Tcp { listener: TcpListener, tls: Option<Arc<ServerTls>> },
}

/// An accepted connection.
pub(super) enum Accepted {
    Unix(UnixStream),
    Tcp(TcpStream, SocketAddr),
}

impl Listener {
    /// Listens without TLS. Must be called within a tokio runtime.
    ///
    /// Creates the directory of a unix socket if needed, and replaces a socket without a listening process.
    pub async fn bind(target: &Target) -> Result<Self, ListenError> {
        Self::bind_tls(target, None).await
    }

    /// Listens, with TLS on TCP ports; unix sockets need none.
    pub async fn bind_tls(target: &Target, tls: Option<Arc<ServerTls>>) -> Result<Self, ListenError> {
        match target {
            Target::Unix(path) => unix(target, path).await,
            Target::Tcp { host, port } => tcp(target, host, *port, tls).await,
        }
    }

    /// The address, with the actual port if port 0 was requested.
    pub fn address(&self) -> &Target {
        &self.address
    }

    /// The TLS that every connection must use.
    pub(super) fn tls(&self) -> Option<&Arc<ServerTls>> {
        match &self.kind {
            Kind::Unix { .. } => None,
            Kind::Tcp { tls, .. } => tls.as_ref(),
        }
    }

    /// Cancel safe.
    pub(super) async fn accept(&self) -> io::Result<Accepted> {
        Ok(match &self.kind {
            Kind::Unix { listener, .. } => Accepted::Unix(listener.accept().await?.0),
            Kind::Tcp { listener, .. } => {
                let (stream, client) = listener.accept().await?;
                Accepted::Tcp(stream, client)
            }
        })
    }
}

async fn unix(target: &Target, path: &Path) -> Result<Listener, ListenError> {
    let system = |call| {
        let target = target.clone();
        move |error| ListenError::System { target, call, error }
    };
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(system("mkdir of its directory"))?;
    }
    match fs::symlink_metadata(path) {
        Ok(it) if !it.file_type().is_socket() => return Err(ListenError::NotASocket(path.to_owned())),
        Ok(_) => match UnixStream::connect(path).await {
            Ok(_) => return Err(ListenError::InUse(path.to_owned())),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(system("unlink of the stale socket"))?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // The backlog is full, so a process listens.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(ListenError::InUse(path.to_owned()));
            }
            Err(error) => return Err(system("connect to check whether it is in use")(error)),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(system("stat")(error)),
    }
    let socket = UnixSocket::new_stream().map_err(system("socket"))?;
    // bind(2) creates the file with the mode of the socket.
    let mode = Mode::S_IRUSR | Mode::S_IWUSR;
    fchmod(socket.as_fd(), mode).map_err(io::Error::from).map_err(system("fchmod"))?;
    socket.bind(path).map_err(system("bind"))?;
    let file = SocketFile::new(path).map_err(system("stat"))?;
    let listener = socket.listen(BACKLOG).map_err(system("listen"))?;
    Ok(Listener { address: target.clone(), kind: Kind::Unix { listener, _file: file } })
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
    Ok(Listener { address, kind: Kind::Tcp { listener, tls } })
}

/// The file of a unix socket; removed on drop, unless another socket has replaced it.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
}

impl SocketFile {
    fn new(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), identity: identity(path)? })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|it| it == self.identity)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::debug!(%error, "unlink {}", self.path.display());
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let it = fs::symlink_metadata(path)?;
    Ok((it.dev(), it.ino()))
}
