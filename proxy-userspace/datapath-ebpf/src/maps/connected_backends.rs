//! The backends to which sockets are connected through Services, in all network namespaces, entered or not.
//!
//! Invariant: nothing is changed, and a socket that connects meanwhile may be missed.

use std::{collections::BTreeSet, net::SocketAddr};

use proxy_common::{
    overflow::{CONNECTED, OverflowEntry, OverflowKey},
    sock_nat::{NatSlot, SockNat},
};

use crate::{
    error::Error,
    maps::{pins::Pins, record_map::RecordMap},
};

#[derive(Debug)]
pub struct ConnectedBackends {
    slots: RecordMap<u32, NatSlot>,
    /// The NAT entries of sockets without a slot.
    overflow: RecordMap<OverflowKey, OverflowEntry>,
}

impl ConnectedBackends {
    pub(crate) fn open(pins: &Pins) -> Result<Self, Error> {
        let slots = RecordMap::open(&pins.sock_nat_map("slots"))?;
        Ok(Self { slots, overflow: RecordMap::open(&pins.sock_nat_map("overflow"))? })
    }

    /// The NAT entry of a connected socket, by its cookie.
    pub(crate) fn of(&self, cookie: u64) -> Option<SockNat> {
        let index = cookie as u32 & self.slots.capacity.saturating_sub(1);
        let slot = self.slots.get(&index).ok()??;
        if slot.cookie == cookie && slot.claims != 0 && !slot.connected().backend.is_unset() {
            return Some(slot.nat);
        }
        self.overflow.get(&OverflowKey::connected(cookie)).ok()?.map(|it| it.connected())
    }

    /// Which of these addresses a socket is connected to through a Service. TCP and UDP are not told apart, as NAT entries have
    /// no protocol.
    ///
    /// # Errors
    ///
    /// If the NAT entries cannot be read.
    pub fn among(&self, backends: &BTreeSet<SocketAddr>) -> Result<BTreeSet<SocketAddr>, Error> {
        let mut found = BTreeSet::new();
        let mut find = |nat: SockNat| {
            let backend = SocketAddr::from(nat.backend);
            if !nat.backend.is_unset() && backends.contains(&backend) {
                found.insert(backend);
            }
        };
        self.slots.each_value(|it| {
            if it.claims != 0 {
                find(it.connected());
            }
        })?;
        for (key, entry) in self.overflow.read()? {
            if key.kind == CONNECTED {
                find(entry.connected());
            }
        }
        Ok(found)
    }
}
