//! Usage of the tables that clients fill, read every few seconds.
//!
//! Invariant: it costs a few loads, whatever the number of entries: programs count, and no table is read to count it.

use aya::{
    Ebpf,
    maps::{Array, Map, MapData},
};
use datapath::TableStats;

use crate::{error::Error, map_spec, udp_nat_gc::UdpNatGc};

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
