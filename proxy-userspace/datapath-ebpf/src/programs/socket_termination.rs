//! Terminates connected sockets whose endpoint no longer serves their Service: the program gets ECONNABORTED, or, with UDP,
//! EDESTADDRREQ if its next call is a send (a terminated socket is no longer connected, which is checked first), and can
//! reconnect. Unconnected UDP sockets select another endpoint with their next datagram.
//!
//! Invariant: a socket is terminated only if its NAT entry says that it was redirected. Sockets that are connected to a pod
//! directly are never terminated.

use std::{io, net::SocketAddr};

use datapath::TerminationReport;
use netlink::{
    netns,
    sock_diag::{ConnectedSocket, SockDiag, Transport},
};

use crate::{
    error::Error,
    maps::{connected_backends::ConnectedBackends, pins::Pins},
};

/// Terminates sockets.
pub struct SocketTerminator {
    connected: ConnectedBackends,
}

impl SocketTerminator {
    /// Opens the maps with the NAT entries of sockets.
    pub(crate) fn open(pins: &Pins) -> Result<Self, Error> {
        Ok(Self { connected: ConnectedBackends::open(pins)? })
    }

    /// Terminates every connected socket of a transport that was redirected from a Service address to a backend for which
    /// `is_lost(service, backend)`, in this network namespace and in every other one that can be entered. `None` if
    /// `is_current` says that another state is active meanwhile; then the call has to be repeated with that one.
    ///
    /// # Errors
    ///
    /// If the sockets of this namespace cannot be listed, or one cannot be terminated.
    pub fn terminate(
        &self,
        transport: Transport,
        is_lost: &(dyn Fn(SocketAddr, SocketAddr) -> bool + Sync),
        is_current: &(dyn Fn() -> bool + Sync),
    ) -> io::Result<Option<TerminationReport>> {
        let terminate_here = || self.terminate_here(transport, is_lost, is_current);
        let mut sockets = terminate_here()?;
        let all_namespaces = netns::for_each_other(|| match terminate_here() {
            Ok(more) => sockets += more,
            Err(error) => tracing::debug!(%error, "sockets of a network namespace skipped"),
        })?;
        Ok(is_current().then_some(TerminationReport { sockets, all_namespaces }))
    }

    fn terminate_here(
        &self,
        transport: Transport,
        is_lost: &dyn Fn(SocketAddr, SocketAddr) -> bool,
        is_current: &dyn Fn() -> bool,
    ) -> io::Result<usize> {
        let kernel = SockDiag::open()?;
        let mut terminated = 0;
        let sockets = kernel.connected(transport)?;
        // A socket that connected meanwhile may have a backend that only a newer state allows.
        if !is_current() {
            return Ok(0);
        }
        let mut failed = None;
        for socket in sockets {
            if self.service_of(&socket).is_some_and(|service| is_lost(service, socket.peer())) {
                match kernel.terminate(&socket) {
                    Ok(is_terminated) => terminated += usize::from(is_terminated),
                    // The remaining sockets are still terminated.
                    Err(error) => failed = Some(error),
                }
            }
        }
        failed.map_or(Ok(terminated), Err)
    }

    /// The Service address that a socket connected to, if it was redirected.
    fn service_of(&self, socket: &ConnectedSocket) -> Option<SocketAddr> {
        let nat = self.connected.of(socket.cookie())?;
        (SocketAddr::from(nat.backend) == socket.peer()).then(|| nat.service.into())
    }
}

/// Whether the kernel can terminate sockets: it may have been built without it.
pub(crate) fn is_supported(transport: Transport) -> io::Result<()> {
    SockDiag::open()?.check_termination(transport)
}
