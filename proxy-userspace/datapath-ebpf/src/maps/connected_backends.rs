//! The backends to which sockets are connected through Services, in all network namespaces, entered or not.
//!
//! Invariant: nothing is changed, and a socket that connects meanwhile may be missed.

use std::{collections::BTreeSet, net::SocketAddr, os::fd::AsFd as _};

use aya::maps::MapData;
use proxy_common::{
    overflow::{CONNECTED, OverflowEntry, OverflowKey},
    sock_nat::{NatSlot, SockNat},
};

use crate::{
    error::Error,
    host::raw_bpf::{self, Cursor, EntrySize},
    maps::{map_spec, pins::Pins, record_map::RecordMap},
};

/// How many slots are read at once: 1 MiB.
const SLOTS_PER_PAGE: u32 = 1 << 14;

/// The NAT entries of all sockets.
#[derive(Debug)]
pub struct ConnectedBackends {
    slots: MapData,
    overflow: RecordMap<OverflowKey, OverflowEntry>,
}

impl ConnectedBackends {
    /// Opens the maps with the NAT entries of sockets.
    pub(crate) fn open(pins: &Pins) -> Result<Self, Error> {
        let open = |name| map_spec::get(&pins.sock_nat_map(name));
        Ok(Self { slots: open("slots")?, overflow: RecordMap::new(open("overflow")?, "overflow")? })
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
        let capacity = self.slots.info().map_err(Error::map("slots"))?.max_entries();
        let page = capacity.min(SLOTS_PER_PAGE);
        let (size, mut cursor) = (EntrySize::of::<u32, NatSlot>(), Cursor::default());
        loop {
            let batch = raw_bpf::lookup_batch(self.slots.fd().as_fd(), size, page, &mut cursor)
                .map_err(Error::syscall("BPF_MAP_LOOKUP_BATCH", "slots"))?;
            let slots = batch.values.chunks_exact(size.value).map(bytemuck::pod_read_unaligned::<NatSlot>);
            slots.filter(|it| it.claims != 0).for_each(|it| find(it.connected()));
            if batch.is_last {
                break;
            }
        }
        for (key, entry) in self.overflow.read()? {
            if key.kind == CONNECTED {
                find(entry.connected());
            }
        }
        Ok(found)
    }
}
