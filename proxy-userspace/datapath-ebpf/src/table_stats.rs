//! Usage of the tables that clients fill, read every few seconds; and the deletion of entries of closed sockets from the UDP
//! NAT table.
//!
//! Invariant: reading it costs a few loads, whatever the number of entries: programs count, and no table is read to count it.
//! Only entries of closed sockets are deleted.

use std::{io::ErrorKind, os::fd::AsFd as _};

use aya::{
    Ebpf,
    maps::{Array, Map, MapData},
};
use datapath::{TableStats, UdpNatStats};
use proxy_common::udp_nat::{COLLECTED, DELETED, INSERTED, LEAKED, REFUSED, UdpNatEntry, UdpNatKey, leaked};

use crate::{
    error::Error,
    map_spec,
    raw_bpf::{self, EntrySize},
};

const SLOT_OVERFLOWS: &str = "SLOT_OVERFLOWS";
const AFFINITY_INSERTS: &str = "AFFINITY_INSERTS";
const AFFINITY: &str = "AFFINITY";

/// The maps with the counts.
pub(super) struct StatsReader {
    udp_nat: UdpNatGc,
    slot_overflows: Array<MapData, u64>,
    affinity_inserts: Array<MapData, u64>,
    affinity_capacity: u32,
}

impl StatsReader {
    /// Takes the maps out of the loaded object.
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, Error> {
        let udp_nat = UdpNatGc::take(ebpf)?;
        let slot_overflows = map_spec::take(ebpf, SLOT_OVERFLOWS)?;
        let affinity_inserts = map_spec::take(ebpf, AFFINITY_INSERTS)?;
        // The programs are not loaded yet and need the table, so that it is not taken.
        let Some(Map::LruHashMap(affinity)) = ebpf.map(AFFINITY) else {
            return Err(Error::Incomplete(format!("map {AFFINITY}")));
        };
        let affinity_capacity = affinity.info().map_err(Error::map(AFFINITY))?.max_entries();
        Ok(Self { udp_nat, slot_overflows, affinity_inserts, affinity_capacity })
    }

    /// Reads the usage, after the entries of closed UDP sockets were deleted.
    pub(super) fn read(&mut self) -> Result<TableStats, Error> {
        Ok(TableStats {
            udp_nat: self.udp_nat.collect()?,
            slot_overflows: self.slot_overflows.get(&0, 0).map_err(Error::map(SLOT_OVERFLOWS))?,
            affinity_inserts: self.affinity_inserts.get(&0, 0).map_err(Error::map(AFFINITY_INSERTS))?,
            affinity_capacity: self.affinity_capacity,
        })
    }
}

const UDP_NAT: &str = "UDP_NAT";
const UDP_NAT_STATS: &str = "UDP_NAT_STATS";

/// The UDP NAT table and its statistics.
struct UdpNatGc {
    table: MapData,
    stats: Array<MapData, u64>,
    capacity: u32,
    /// How many sockets had leaked entries when entries were last deleted.
    leaked: u64,
}

impl UdpNatGc {
    /// Takes both maps out of the loaded object.
    fn take(ebpf: &mut Ebpf) -> Result<Self, Error> {
        let Some(Map::HashMap(table)) = ebpf.take_map(UDP_NAT) else {
            return Err(Error::Incomplete(format!("map {UDP_NAT}")));
        };
        let stats = map_spec::take(ebpf, UDP_NAT_STATS)?;
        let capacity = table.info().map_err(Error::map(UDP_NAT))?.max_entries();
        Ok(Self { table, stats, capacity, leaked: 0 })
    }

    /// Deletes leaked entries, if there are new ones, and reports the usage of the table.
    fn collect(&mut self) -> Result<UdpNatStats, Error> {
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
            .map_err(Error::syscall("BPF_MAP_LOOKUP_BATCH", UDP_NAT))?;
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
                    result = Err(Error::syscall("BPF_MAP_DELETE_BATCH", UDP_NAT)(error));
                    break;
                }
            }
        }
        if deleted > 0 {
            // Programs write the other statistics; only user space writes this one.
            let collected = self.stat(COLLECTED)? + deleted;
            self.stats.set(COLLECTED, collected, 0).map_err(Error::map(UDP_NAT_STATS))?;
        }
        result
    }

    fn stat(&self, index: u32) -> Result<u64, Error> {
        self.stats.get(&index, 0).map_err(Error::map(UDP_NAT_STATS))
    }
}
