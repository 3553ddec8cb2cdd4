//! What unconnected UDP sockets remember beyond their own storage: how full the table is, and what nobody needs any more.
//!
//! The one rule: only entries of sockets that are closed are taken away.

use std::{io::ErrorKind, os::fd::AsFd as _};

use aya::{
    Ebpf,
    maps::{Array, Map, MapData},
};
use datapath::UdpNatStats;
use proxy_common::udp_nat::{COLLECTED, DELETED, INSERTED, LEAKED, REFUSED, UdpNatEntry, UdpNatKey, leaked};

use crate::{error::Error, raw_bpf};

const TABLE: &str = "UDP_NAT";
const COUNTS: &str = "UDP_NAT_STATS";

/// The table, and what is counted of it.
pub(super) struct Peers {
    table: MapData,
    counts: Array<MapData, u64>,
    capacity: u32,
    /// How many closed sockets had left something over when it was last taken away.
    left: u64,
}

impl Peers {
    /// Takes both maps out of the loaded object.
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, Error> {
        let mut map = |name| ebpf.take_map(name).ok_or_else(|| Error::Incomplete(format!("map {name}")));
        let Map::HashMap(table) = map(TABLE)? else {
            return Err(Error::Incomplete(format!("table {TABLE}")));
        };
        let counts = Array::try_from(map(COUNTS)?).map_err(Error::map(COUNTS))?;
        let capacity = table.info().map_err(Error::map(TABLE))?.max_entries();
        Ok(Self { table, counts, capacity, left: 0 })
    }

    /// Says how full the table is, after it has taken away what closed sockets have left over.
    pub(super) fn look(&mut self) -> Result<UdpNatStats, Error> {
        let left = self.count(LEAKED)?;
        if left != self.left {
            self.sweep()?;
            self.left = left;
        }
        let entries = self.count(INSERTED)?.saturating_sub(self.count(DELETED)? + self.count(COLLECTED)?);
        Ok(UdpNatStats { entries, capacity: self.capacity, refused: self.count(REFUSED)? })
    }

    fn sweep(&mut self) -> Result<(), Error> {
        let entry = raw_bpf::Entry { key: size_of::<UdpNatKey>(), value: size_of::<UdpNatEntry>() };
        let (keys, values) = raw_bpf::lookup_all(self.table.fd().as_fd(), entry, self.capacity)
            .map_err(Error::syscall("BPF_MAP_LOOKUP_BATCH", TABLE))?;
        let keys = keys.chunks_exact(entry.key).map(bytemuck::pod_read_unaligned);
        let values = values.chunks_exact(entry.value).map(bytemuck::pod_read_unaligned);
        let entries: Vec<(UdpNatKey, UdpNatEntry)> = keys.zip(values).collect();
        let mut swept = 0;
        let mut result = Ok(());
        for key in leaked(&entries) {
            // One by one: a batch ends at the first that is gone, and does not say how far it came.
            match raw_bpf::delete_batch(self.table.fd().as_fd(), entry, bytemuck::bytes_of(key)) {
                Ok(()) => swept += 1,
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => {
                    result = Err(Error::syscall("BPF_MAP_DELETE_BATCH", TABLE)(error));
                    break;
                }
            }
        }
        if swept > 0 {
            // Programs count what they take away themselves; this one is ours alone.
            let swept = self.count(COLLECTED)? + swept;
            self.counts.set(COLLECTED, swept, 0).map_err(Error::map(COUNTS))?;
        }
        result
    }

    fn count(&self, what: u32) -> Result<u64, Error> {
        self.counts.get(&what, 0).map_err(Error::map(COUNTS))
    }
}
