//! What is listened at: a socket and a task for each frontend that has endpoints.
//!
//! A frontend without endpoints has no socket: its clients are refused by the kernel.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::SocketAddr,
    sync::Arc,
};

use proxy_contract::{backend::NotServed, localv1::Protocol};
use socket2::{Domain, Socket, Type};
use tokio::{
    net::{TcpListener, UdpSocket},
    task::AbortHandle,
};

use crate::{
    frontend::{Address, Frontend},
    listen_at::ListenAt,
    table::Table,
    tcp, udp,
};

/// The connections that wait to be accepted.
const BACKLOG: i32 = 1024;
/// What is added to a port that this user may not listen at: 80 becomes 10080.
const UNPRIVILEGED_OFFSET: u16 = 10_000;
/// This process has too many open files: EMFILE, or WSAEMFILE of Windows.
const TOO_MANY_FILES: i32 = if cfg!(windows) { 10024 } else { 24 };
/// How many frontends are named that cannot be listened at.
const MAX_REPORTED: usize = 100;

/// The listeners by the addresses of their frontends, or why there is none.
#[derive(Debug, Default)]
pub(crate) struct Listeners(BTreeMap<Address, Result<Running, NotServed>>);

/// Ends the task when dropped.
#[derive(Debug)]
struct Running(AbortHandle);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A socket that nothing is accepted at yet.
pub(crate) enum Bound {
    Tcp(TcpListener),
    Udp(UdpSocket),
}

impl Listeners {
    pub(crate) fn bind(
        &mut self,
        edits: &[(Address, Option<Arc<Frontend>>)],
        listen_at: ListenAt,
    ) -> Vec<(Address, Option<Bound>)> {
        let mut changed = Vec::new();
        for (address, frontend) in edits {
            let Some(frontend) = frontend.as_ref().filter(|it| it.has_endpoints()) else {
                changed.push((*address, None));
                continue;
            };
            if matches!(self.0.get(address), Some(Ok(_))) {
                continue;
            }
            match bind(address, listen_at) {
                Ok((bound, at)) => {
                    let service = &frontend.service;
                    tracing::info!(%service, %at, %address, "listening");
                    changed.push((*address, Some(bound)));
                }
                Err(error) => {
                    let reason =
                        format!("cannot listen at {address}: {error}; {}", remedy(&error, listen_at));
                    let service = Arc::clone(&frontend.service);
                    self.0.insert(*address, Err(NotServed { service, reason }));
                }
            }
        }
        changed
    }

    /// Accepts at new sockets, and closes those that have no endpoints any more.
    pub(crate) fn start(&mut self, changed: Vec<(Address, Option<Bound>)>, table: &Arc<Table>) {
        for (address, bound) in changed {
            let table = Arc::clone(table);
            let task = match bound {
                None => {
                    self.0.remove(&address);
                    continue;
                }
                Some(Bound::Tcp(it)) => tokio::spawn(tcp::serve(it, address, table)),
                Some(Bound::Udp(it)) => tokio::spawn(udp::serve(it, address, table)),
            };
            self.0.insert(address, Ok(Running(task.abort_handle())));
        }
    }

    pub(crate) fn failed(&self) -> BTreeSet<Address> {
        self.0.iter().filter(|(_, it)| it.is_err()).map(|(address, _)| *address).collect()
    }

    pub(crate) fn not_served(&self) -> impl Iterator<Item = NotServed> {
        self.0.values().filter_map(|it| it.as_ref().err()).take(MAX_REPORTED).cloned()
    }
}

/// The socket, and the address that it has.
fn bind(wanted: &Address, listen_at: ListenAt) -> io::Result<(Bound, SocketAddr)> {
    let address = wanted.socket;
    match bind_at(address, wanted.protocol) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && listen_at == ListenAt::Loopback => {
            let Some(port) = address.port().checked_add(UNPRIVILEGED_OFFSET) else { return Err(error) };
            let address = SocketAddr::new(address.ip(), port);
            Ok((bind_at(address, wanted.protocol)?, address))
        }
        result => Ok((result?, address)),
    }
}

fn bind_at(address: SocketAddr, protocol: Protocol) -> io::Result<Bound> {
    let is_tcp = protocol == Protocol::Tcp;
    let kind = if is_tcp { Type::STREAM } else { Type::DGRAM };
    let socket = Socket::new(Domain::for_address(address), kind, None)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    // Connections of an earlier process may be in TIME_WAIT; on Windows the option would share the port with other programs.
    if is_tcp && cfg!(unix) {
        socket.set_reuse_address(true)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    if is_tcp {
        socket.listen(BACKLOG)?;
    }
    Ok(if is_tcp {
        Bound::Tcp(TcpListener::from_std(socket.into())?)
    } else {
        Bound::Udp(UdpSocket::from_std(socket.into())?)
    })
}

pub(crate) fn remedy(error: &io::Error, listen_at: ListenAt) -> &'static str {
    if error.raw_os_error() == Some(TOO_MANY_FILES) {
        return "raise the limit of open files (LimitNOFILE of systemd): each address takes one, each connection two";
    }
    match (error.kind(), listen_at) {
        (io::ErrorKind::AddrInUse, _) => "end the program that listens there",
        (io::ErrorKind::AddrNotAvailable, ListenAt::Services) => {
            "make the address local, as by `ip route add local 10.96.0.0/12 dev lo`"
        }
        (io::ErrorKind::AddrNotAvailable, ListenAt::Loopback) => "add the address to the loopback interface",
        (io::ErrorKind::PermissionDenied, _) => "lower net.ipv4.ip_unprivileged_port_start",
        _ => "it is tried again",
    }
}
