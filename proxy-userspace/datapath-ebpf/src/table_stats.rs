//! How much is remembered for sockets and clients, and how often there was no room for it.
//!
//! The one rule: what is asked every few seconds is a few words, whatever there is; nothing is counted by reading it all.

use aya::{
    Ebpf,
    maps::{Array, Map, MapData},
};

use datapath::TableStats;

use crate::{error::Error, udp_nat_gc::Peers};

const SLOT_OVERFLOWS: &str = "SLOT_OVERFLOWS";
const AFFINITY_INSERTS: &str = "AFFINITY_INSERTS";
const AFFINITY: &str = "AFFINITY";

/// The maps that tell.
pub(super) struct Remembered {
    peers: Peers,
    overflowed: Array<MapData, u64>,
    came: Array<MapData, u64>,
    client_capacity: u32,
}

impl Remembered {
    /// Takes the maps out of the loaded object.
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, Error> {
        let peers = Peers::take(ebpf)?;
        let mut map = |name| ebpf.take_map(name).ok_or_else(|| Error::Incomplete(format!("map {name}")));
        let overflowed = Array::try_from(map(SLOT_OVERFLOWS)?).map_err(Error::map(SLOT_OVERFLOWS))?;
        let came = Array::try_from(map(AFFINITY_INSERTS)?).map_err(Error::map(AFFINITY_INSERTS))?;
        // The programs are not loaded yet, and need the table itself.
        let Some(Map::LruHashMap(clients)) = ebpf.map(AFFINITY) else {
            return Err(Error::Incomplete(format!("table {AFFINITY}")));
        };
        let client_capacity = clients.info().map_err(Error::map(AFFINITY))?.max_entries();
        Ok(Self { peers, overflowed, came, client_capacity })
    }

    /// Says how much there is, after it has taken away what closed sockets have left over.
    pub(super) fn look(&mut self) -> Result<TableStats, Error> {
        Ok(TableStats {
            udp_nat: self.peers.look()?,
            slot_overflows: self.overflowed.get(&0, 0).map_err(Error::map(SLOT_OVERFLOWS))?,
            affinity_inserts: self.came.get(&0, 0).map_err(Error::map(AFFINITY_INSERTS))?,
            affinity_capacity: self.client_capacity,
        })
    }
}
