//! Deletes the entries of closed sockets from the UDP NAT table, and reports its usage.
//!
//! Invariant: only entries of closed sockets are deleted.

use std::{io::ErrorKind, os::fd::AsFd as _};

use aya::{
    Ebpf,
    maps::{Array, Map, MapData},
};
use datapath::UdpNatStats;
use proxy_common::udp_nat::{COLLECTED, DELETED, INSERTED, LEAKED, REFUSED, UdpNatEntry, UdpNatKey, leaked};

use crate::{
    error::Error,
    map_spec,
    raw_bpf::{self, EntrySize},
};

const TABLE: &str = "UDP_NAT";
const STATS: &str = "UDP_NAT_STATS";

/// The UDP NAT table and its statistics.
pub(super) struct UdpNatGc {
    table: MapData,
    stats: Array<MapData, u64>,
    capacity: u32,
    /// How many sockets had leaked entries when entries were last deleted.
    leaked: u64,
}

impl UdpNatGc {
    /// Takes both maps out of the loaded object.
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, Error> {
        let Some(Map::HashMap(table)) = ebpf.take_map(TABLE) else {
            return Err(Error::Incomplete(format!("map {TABLE}")));
        };
        let stats = map_spec::take(ebpf, STATS)?;
        let capacity = table.info().map_err(Error::map(TABLE))?.max_entries();
        Ok(Self { table, stats, capacity, leaked: 0 })
    }

    /// Deletes leaked entries, if there are new ones, and reports the usage of the table.
    pub(super) fn collect(&mut self) -> Result<UdpNatStats, Error> {
        let leaked = self.stat(LEAKED)?;
        if leaked != self.leaked {
            self.delete_leaked()?;
            self.leaked = leaked;
        }
        let entries = self.stat(INSERTED)?.saturating_sub(self.stat(DELETED)? + self.stat(COLLECTED)?);
        Ok(UdpNatStats { entries, capacity: self.capacity, refused: self.stat(REFUSED)? })
    }

    fn delete_leaked(&mut self) -> Result<(), Error> {
        let size = EntrySize::of::<UdpNatKey, UdpNatEntry>();
        let (keys, values) = raw_bpf::lookup_all(self.table.fd().as_fd(), size, self.capacity)
            .map_err(Error::syscall("BPF_MAP_LOOKUP_BATCH", TABLE))?;
        let keys = keys.chunks_exact(size.key).map(bytemuck::pod_read_unaligned);
        let values = values.chunks_exact(size.value).map(bytemuck::pod_read_unaligned);
        let entries: Vec<(UdpNatKey, UdpNatEntry)> = keys.zip(values).collect();
        let mut deleted = 0;
        let mut result = Ok(());
        for key in leaked(&entries) {
            // One by one: a batch stops at the first missing key, and does not report how many it deleted.
            match raw_bpf::delete_batch(self.table.fd().as_fd(), size, bytemuck::bytes_of(key)) {
                Ok(()) => deleted += 1,
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => {
                    result = Err(Error::syscall("BPF_MAP_DELETE_BATCH", TABLE)(error));
                    break;
                }
            }
        }
        if deleted > 0 {
            // Programs write the other statistics; only user space writes this one.
            let collected = self.stat(COLLECTED)? + deleted;
            self.stats.set(COLLECTED, collected, 0).map_err(Error::map(STATS))?;
        }
        result
    }

    fn stat(&self, index: u32) -> Result<u64, Error> {
        self.stats.get(&index, 0).map_err(Error::map(STATS))
    }
}
