//! Ends connected UDP sockets whose endpoint does not serve their Service any more: the program gets ECONNABORTED, or
//! EDESTADDRREQ if its next call is a send (a socket that was ended is connected no more, and that is asked first), and
//! asks again. What goes without a connection finds another endpoint by itself, and TCP notices.
//!
//! The one rule: a socket is ended only if its own memory says that we have led it there. Who connected to a pod directly
//! is spared.

use std::{io, net::SocketAddr, thread};

use aya::maps::{Array, HashMap, Map, MapData};
use datapath::TerminationReport;
use model::state::NodeState;
use netlink::{
    netns,
    sock_diag::{ConnectedUdp, SockDiag},
};
use proxy_common::{
    sock_nat::{NatSlot, SockNat},
    udp_nat::{UdpNatEntry, UdpNatKey},
};

use crate::{error::Error, map_spec, pins::Pins, udp_backends::Flows};

/// Ends sockets.
pub struct UdpTerminator {
    slots: Array<MapData, [u64; WORDS]>,
    slot_mask: u64,
    /// What those without a slot remember; the kernel does not tell what a UDP socket has in its storage.
    peers: HashMap<MapData, [u64; KEY], [u64; VALUE]>,
}

/// A slot in words.
const WORDS: usize = size_of::<NatSlot>() / size_of::<u64>();
/// An entry in words.
const KEY: usize = size_of::<UdpNatKey>() / size_of::<u64>();
const VALUE: usize = size_of::<UdpNatEntry>() / size_of::<u64>();

impl UdpTerminator {
    /// Opens what sockets remember.
    pub(super) fn open(pins: &Pins) -> Result<Self, Error> {
        let slots = map_spec::get(&pins.sock_nat_map("slots"))?;
        let info = slots.info().map_err(Error::map("slots"))?;
        let slot_mask = u64::from(info.max_entries().saturating_sub(1));
        let slots = Map::from_map_data(slots).and_then(Array::try_from).map_err(Error::map("slots"))?;
        let peers = map_spec::get(&pins.sock_nat_map("udp_nat"))?;
        let peers = Map::from_map_data(peers).and_then(HashMap::try_from).map_err(Error::map("udp_nat"))?;
        Ok(Self { slots, slot_mask, peers })
    }

    /// Ends every connected UDP socket that was led to where no flow of `state` goes: in this network namespace, and in
    /// every other that may be entered. `None` if that state is not in force any more, as `is_current` says; then it is to
    /// be done again.
    ///
    /// # Errors
    ///
    /// If the kernel does not tell of this namespace's sockets, or cannot end any.
    pub fn terminate(
        &self,
        state: &NodeState,
        is_current: &(dyn Fn() -> bool + Sync),
    ) -> io::Result<Option<TerminationReport>> {
        let flows = Flows::of(state);
        // A thread that has been elsewhere is good for nothing else.
        let pass = || {
            let mut sockets = self.terminate_here(&flows, is_current)?;
            let everywhere = netns::for_each_other(|| match self.terminate_here(&flows, is_current) {
                Ok(more) => sockets += more,
                Err(error) => tracing::debug!("sockets of a network namespace cannot be looked at: {error}"),
            })?;
            Ok(is_current().then_some(TerminationReport { sockets, all_namespaces: everywhere }))
        };
        thread::scope(|it| it.spawn(pass).join())
            .unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
    }

    fn terminate_here(&self, flows: &Flows, is_current: &dyn Fn() -> bool) -> io::Result<usize> {
        let kernel = SockDiag::open()?;
        let mut ended = 0;
        let sockets = kernel.connected_udp()?;
        // Sockets that connected since may have been led to where only a newer state leads.
        if !is_current() {
            return Ok(0);
        }
        let mut failed = None;
        for socket in sockets {
            if let Some(service) = self.service_of(&socket)
                && !flows.serves(service, socket.peer())
            {
                match kernel.terminate(&socket) {
                    Ok(is_ended) => ended += usize::from(is_ended),
                    // The others are not to wait for it.
                    Err(error) => failed = Some(error),
                }
            }
        }
        failed.map_or(Ok(ended), Err)
    }

    /// The Service address that the socket was led away from, if it was.
    fn service_of(&self, socket: &ConnectedUdp) -> Option<SocketAddr> {
        let nat = self.nat(socket)?;
        (SocketAddr::from(nat.backend) == socket.peer()).then(|| nat.service.into())
    }

    fn nat(&self, socket: &ConnectedUdp) -> Option<SockNat> {
        let cookie = socket.cookie();
        let index = u32::try_from(cookie & self.slot_mask).ok()?;
        let slot: NatSlot = bytemuck::cast(self.slots.get(&index, 0).ok()?);
        if slot.cookie == cookie && slot.claims != 0 {
            return Some(slot.nat);
        }
        let key: [u64; KEY] = bytemuck::cast(UdpNatKey::connected(cookie));
        let UdpNatEntry { peer: backend, next: service, .. } = bytemuck::cast(self.peers.get(&key, 0).ok()?);
        Some(SockNat { service, backend })
    }
}

/// Whether sockets can be ended: the kernel may have been built without it.
pub(super) fn is_supported() -> io::Result<()> {
    SockDiag::open()?.check_termination()
}
