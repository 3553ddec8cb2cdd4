//! Unix sockets.
//!
//! Invariant: only this user and root can connect, and the group that is allowed to: a socket has mode 0600 from its creation
//! on, and its other mode only after its group.

use std::{
    fs, io,
    os::{
        fd::AsFd as _,
        unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, chown},
    },
    path::{Path, PathBuf},
};

use nix::sys::stat::{Mode, fchmod};
use tokio::net::{UnixListener, UnixSocket as Socket, UnixStream};

/// Why a path cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error("unix://{}: {reason}", path.display())]
pub struct UnixSocketError {
    path: PathBuf,
    reason: String,
}

/// The permissions of a Unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketAccess {
    /// The mode of its file, as 0o660.
    pub mode: u32,
    /// The number of its group; this process's own if none.
    pub group: Option<u32>,
}

impl Default for SocketAccess {
    /// Only this user and root.
    fn default() -> Self {
        Self { mode: 0o600, group: None }
    }
}

/// A listening Unix socket. When it is dropped, its file is removed.
#[derive(Debug)]
pub struct UnixSocket {
    listener: UnixListener,
    _file: SocketFile,
}

impl UnixSocket {
    /// Listens for those that `access` permits; must be called within a tokio runtime.
    ///
    /// Creates the directory if needed, and replaces a socket without a listening process.
    pub async fn bind(path: &Path, backlog: u32, access: SocketAccess) -> Result<Self, UnixSocketError> {
        let failed = |reason: String| UnixSocketError { path: path.to_owned(), reason };
        let in_use = || failed("another process listens there; stop it, or choose another address".into());
        let system = |call: &'static str| move |error: io::Error| failed(format!("{call}: {error}"));
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).map_err(system("mkdir of its directory"))?;
        }
        match fs::symlink_metadata(path) {
            Ok(it) if !it.file_type().is_socket() => {
                let reason = "exists and is not a socket; remove it, or choose another address";
                return Err(failed(reason.into()));
            }
            Ok(_) => match UnixStream::connect(path).await {
                Ok(_) => return Err(in_use()),
                Err(error) => match error.kind() {
                    io::ErrorKind::ConnectionRefused => {
                        fs::remove_file(path).map_err(system("unlink of the stale socket"))?;
                    }
                    io::ErrorKind::NotFound => {}
                    // The backlog is full, or the process is just closing its socket.
                    io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionReset => return Err(in_use()),
                    _ => return Err(system("connect to check whether it is in use")(error)),
                },
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(system("stat")(error)),
        }
        let socket = Socket::new_stream().map_err(system("socket"))?;
        // bind(2) creates the file with the mode of the socket.
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        fchmod(socket.as_fd(), mode).map_err(io::Error::from).map_err(system("fchmod"))?;
        socket.bind(path).map_err(system("bind"))?;
        let identity = identity(path).map_err(system("stat"))?;
        let file = SocketFile { path: path.to_owned(), identity };
        if access.group.is_some() {
            chown(path, None, access.group).map_err(system("chown to the group"))?;
        }
        if access.mode != 0o600 {
            fs::set_permissions(path, fs::Permissions::from_mode(access.mode)).map_err(system("chmod"))?;
        }
        let listener = socket.listen(backlog).map_err(system("listen"))?;
        Ok(Self { listener, _file: file })
    }

    /// Accepts a connection. Cancel safe.
    pub async fn accept(&self) -> io::Result<UnixStream> {
        Ok(self.listener.accept().await?.0)
    }
}

/// The file of a socket; removed on drop, unless another socket has replaced it.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|it| it == self.identity)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::debug!(path = %self.path.display(), %error, "unlink failed");
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let it = fs::symlink_metadata(path)?;
    Ok((it.dev(), it.ino()))
}
