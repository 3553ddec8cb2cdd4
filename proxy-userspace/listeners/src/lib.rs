//! Shared parts of servers and sources: Unix sockets, limits of connections, and threads with a runtime.
//!
//! Invariant: a listener costs a bounded number of connections, and a new one is always accepted.

#![forbid(unsafe_code)]

mod connections;
mod runtime_thread;
mod unix_socket;

pub use connections::{Connection, Connections, Limits, max_open_files, raise_max_open_files};
pub use runtime_thread::RuntimeThread;
pub use unix_socket::{SocketAccess, UnixSocket, UnixSocketError};
