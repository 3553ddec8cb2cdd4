//! Terminates connected sockets whose endpoint no longer serves their Service: the program gets ECONNABORTED, or, with UDP,
//! EDESTADDRREQ if its next call is a send (a terminated socket is no longer connected, which is checked first), and can
//! reconnect. Unconnected UDP sockets select another endpoint with their next datagram.
//!
//! Invariant: a socket is terminated only if its NAT entry says that it was redirected. Sockets that are connected to a pod
//! directly are never terminated.

use std::{io, net::SocketAddr, thread};

use aya::maps::{Array, HashMap, MapData};
use datapath::TerminationReport;
use netlink::{
    netns,
    sock_diag::{ConnectedSocket, SockDiag, Transport},
};
use proxy_common::{
    overflow::{OverflowEntry, OverflowKey},
    sock_nat::{NatSlot, SockNat},
};

use crate::{
    error::Error,
    maps::{map_spec, pins::Pins},
};

/// Terminates sockets.
pub struct SocketTerminator {
    slots: Array<MapData, [u64; SLOT_WORDS]>,
    slot_mask: u64,
    /// The NAT entries of sockets without a slot.
    overflow: HashMap<MapData, [u64; KEY_WORDS], [u64; ENTRY_WORDS]>,
}

// aya's maps take types that implement its own `Pod`, as arrays of integers do.
const SLOT_WORDS: usize = size_of::<NatSlot>() / size_of::<u64>();
const KEY_WORDS: usize = size_of::<OverflowKey>() / size_of::<u64>();
const ENTRY_WORDS: usize = size_of::<OverflowEntry>() / size_of::<u64>();

impl SocketTerminator {
    /// Opens the maps with the NAT entries of sockets.
    pub(crate) fn open(pins: &Pins) -> Result<Self, Error> {
        let pin = pins.sock_nat_map("slots");
        let info = map_spec::get(&pin)?.info().map_err(Error::map("slots"))?;
        let slot_mask = u64::from(info.max_entries().saturating_sub(1));
        let slots = map_spec::open(&pin)?;
        let overflow = map_spec::open(&pins.sock_nat_map("overflow"))?;
        Ok(Self { slots, slot_mask, overflow })
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
        // In a thread of its own, because a thread that has entered another namespace cannot be used for anything else.
        let pass = || {
            let mut sockets = terminate_here()?;
            let all_namespaces = netns::for_each_other(|| match terminate_here() {
                Ok(more) => sockets += more,
                Err(error) => tracing::debug!(%error, "sockets of a network namespace skipped"),
            })?;
            Ok(is_current().then_some(TerminationReport { sockets, all_namespaces }))
        };
        thread::scope(|it| it.spawn(pass).join())
            .unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
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
        let nat = self.nat_of(socket)?;
        (SocketAddr::from(nat.backend) == socket.peer()).then(|| nat.service.into())
    }

    fn nat_of(&self, socket: &ConnectedSocket) -> Option<SockNat> {
        let cookie = socket.cookie();
        let index = u32::try_from(cookie & self.slot_mask).ok()?;
        let slot: NatSlot = bytemuck::cast(self.slots.get(&index, 0).ok()?);
        if slot.cookie == cookie && slot.claims != 0 && !slot.connected().backend.is_unset() {
            return Some(slot.nat);
        }
        let key: [u64; KEY_WORDS] = bytemuck::cast(OverflowKey::connected(cookie));
        let entry: OverflowEntry = bytemuck::cast(self.overflow.get(&key, 0).ok()?);
        Some(entry.connected())
    }
}

/// Whether the kernel can terminate sockets: it may have been built without it.
pub(crate) fn is_supported(transport: Transport) -> io::Result<()> {
    SockDiag::open()?.check_termination(transport)
}
