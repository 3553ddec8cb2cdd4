//! Where a brain is reached: a socket in the file system, or a port.
//!
//! The one rule: whoever is not trusted does not get in.
//! A socket is its owner's alone (mode 0600), from its first moment on; a port is one of a loopback address, or speaks
//! mutual TLS.

use std::{
    fs, io,
    net::SocketAddr,
    os::{
        fd::AsFd as _,
        unix::fs::{FileTypeExt as _, MetadataExt as _},
    },
    path::{Path, PathBuf},
    sync::Arc,
    task::{Context, Poll},
};

use nix::sys::stat::{Mode, fchmod};
use proxy_contract::Target;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixSocket, UnixStream, lookup_host};

use super::tls::ServerTls;

/// How many clients may wait to be accepted.
const BACKLOG: u32 = 1024;

/// Why a brain cannot be reached at an address.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The socket is another process's.
    #[error("unix://{}: another process serves there; stop it, or listen elsewhere", .0.display())]
    Taken(PathBuf),
    /// There is something else.
    #[error("unix://{}: there is something that is no socket; remove it, or listen elsewhere", .0.display())]
    NoSocket(PathBuf),
    /// Others than this host's processes would reach it.
    #[error(
        "{target}: {address} is not a loopback address, and beyond loopback mutual TLS is required; give --tls-cert, \
         --tls-key and --tls-client-ca, or listen on 127.0.0.1, [::1] or unix:///path"
    )]
    NotLoopback {
        /// What was asked for.
        target: Target,
        /// What it means.
        address: SocketAddr,
    },
    /// The name of the host means nothing.
    #[error("{0}: the host has no address; listen on 127.0.0.1, [::1] or unix:///path")]
    NoAddress(Target),
    /// A system call failed.
    #[error("{target}: {call}: {error}")]
    System {
        /// What was asked for.
        target: Target,
        /// What was called.
        call: &'static str,
        /// What the system said.
        #[source]
        error: io::Error,
    },
}

/// A place where clients are accepted. The file of a socket is removed when it is dropped.
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

/// What has been accepted.
pub(super) enum Accepted {
    Unix(UnixStream),
    Tcp(TcpStream, SocketAddr),
}

impl Listener {
    /// Begins to listen, without TLS. Must be called within a tokio runtime.
    ///
    /// A socket's folder is made if it is missing; a socket that its process has left behind is replaced.
    pub async fn bind(target: &Target) -> Result<Self, ListenError> {
        Self::bind_tls(target, None).await
    }

    /// The same, with TLS if it is a port; a socket in the file system needs none.
    pub async fn bind_tls(target: &Target, tls: Option<Arc<ServerTls>>) -> Result<Self, ListenError> {
        match target {
            Target::Unix(path) => unix(target, path).await,
            Target::Tcp { host, port } => tcp(target, host, *port, tls).await,
        }
    }

    /// Where it listens, with the port that was chosen if none was asked for.
    pub fn address(&self) -> &Target {
        &self.address
    }

    /// What every connection has to go through first.
    pub(super) fn tls(&self) -> Option<&Arc<ServerTls>> {
        match &self.kind {
            Kind::Unix { .. } => None,
            Kind::Tcp { tls, .. } => tls.as_ref(),
        }
    }

    pub(super) fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<Accepted>> {
        match &self.kind {
            Kind::Unix { listener, .. } => listener.poll_accept(cx).map_ok(|(it, _)| Accepted::Unix(it)),
            Kind::Tcp { listener, .. } => {
                listener.poll_accept(cx).map_ok(|(it, address)| Accepted::Tcp(it, address))
            }
        }
    }
}

async fn unix(target: &Target, path: &Path) -> Result<Listener, ListenError> {
    let system = |call| {
        let target = target.clone();
        move |error| ListenError::System { target, call, error }
    };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(system("mkdir of its folder"))?;
    }
    match fs::symlink_metadata(path) {
        Ok(it) if !it.file_type().is_socket() => return Err(ListenError::NoSocket(path.to_owned())),
        Ok(_) => match UnixStream::connect(path).await {
            Ok(_) => return Err(ListenError::Taken(path.to_owned())),
            // Nobody listens.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(system("unlink of the socket left behind"))?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // Its backlog is full: somebody does.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(ListenError::Taken(path.to_owned()));
            }
            Err(error) => return Err(system("connect to see whether it is in use")(error)),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(system("stat")(error)),
    }
    let socket = UnixSocket::new_stream().map_err(system("socket"))?;
    // The file takes over the mode that the socket has when it is bound.
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

/// The file of a socket, which is removed unless it is another's by now.
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
