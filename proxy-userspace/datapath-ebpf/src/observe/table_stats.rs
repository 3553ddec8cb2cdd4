//! Usage of the tables that clients fill, read every few seconds; and the deletion of entries of closed sockets from the
//! overflow table.
//!
//! Invariant: reading it costs a few loads, whatever the number of entries, while nothing happens: programs count, and no
//! table is read to count it. Only entries of closed sockets are deleted.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use aya::{
    Ebpf,
    maps::{Array, Map, MapData},
};
use datapath::{OverflowStats, RefusedNamespace, TableStats};
use proxy_common::overflow::{
    COLLECTED, DELETED, INSERTED, LEAKED, NetnsUsage, OverflowEntry, OverflowKey, REFUSED, SOCKETS, leaked,
};

use crate::{
    error::Error,
    host::cgroup,
    maps::{map_spec, record_map::RecordMap},
};

const AFFINITY_INSERTS: &str = "AFFINITY_INSERTS";
const AFFINITY: &str = "AFFINITY";
const OVERFLOW_STATS: &str = "OVERFLOW_STATS";

/// How many of the network namespaces that were refused most are reported.
const MAX_REFUSED: usize = 10;

/// The overflow table, and the maps with the counts.
pub(crate) struct StatsReader {
    overflow: RecordMap<OverflowKey, OverflowEntry>,
    overflow_stats: Array<MapData, u64>,
    netns_usage: RecordMap<u64, NetnsUsage>,
    netns_collected: RecordMap<u64, u64>,
    affinity_inserts: Array<MapData, u64>,
    affinity_capacity: u32,
    /// How many sockets had leaked entries when entries were last deleted.
    leaked: u64,
    /// The counts when the usage of the namespaces was read last, and what it was.
    read_at: [u64; 4],
    usage: HashMap<u64, NetnsUsage>,
    refused: Vec<RefusedNamespace>,
}

impl StatsReader {
    /// Takes the maps out of the loaded object.
    pub(crate) fn take(ebpf: &mut Ebpf) -> Result<Self, Error> {
        // The programs are not loaded yet and need the table, so that it is not taken.
        let Some(Map::LruHashMap(affinity)) = ebpf.map(AFFINITY) else {
            return Err(Error::Incomplete(format!("map {AFFINITY}")));
        };
        let affinity_capacity = affinity.info().map_err(Error::map(AFFINITY))?.max_entries();
        Ok(Self {
            overflow: RecordMap::take(ebpf, "OVERFLOW")?,
            overflow_stats: map_spec::take(ebpf, OVERFLOW_STATS)?,
            netns_usage: RecordMap::take(ebpf, "NETNS_USAGE")?,
            netns_collected: RecordMap::take(ebpf, "NETNS_COLLECTED")?,
            affinity_inserts: map_spec::take(ebpf, AFFINITY_INSERTS)?,
            affinity_capacity,
            leaked: 0,
            read_at: [0; 4],
            usage: HashMap::new(),
            refused: Vec::new(),
        })
    }

    /// Reads the usage, after the entries of closed sockets were deleted. `cgroup` is the root of the processes that may have
    /// been refused.
    pub(crate) fn read(&mut self, cgroup: &Path) -> Result<TableStats, Error> {
        Ok(TableStats {
            overflow: self.overflow_stats()?,
            refused: self.refused(cgroup)?,
            affinity_inserts: self.affinity_inserts.get(&0, 0).map_err(Error::map(AFFINITY_INSERTS))?,
            affinity_capacity: self.affinity_capacity,
            ..TableStats::default()
        })
    }

    /// Deletes leaked entries, if there are new ones, and reports the usage of the overflow table.
    fn overflow_stats(&mut self) -> Result<OverflowStats, Error> {
        let leaked = self.overflow_stat(LEAKED)?;
        if leaked != self.leaked {
            self.delete_leaked()?;
            self.leaked = leaked;
        }
        let entries = self
            .overflow_stat(INSERTED)?
            .saturating_sub(self.overflow_stat(DELETED)? + self.overflow_stat(COLLECTED)?);
        Ok(OverflowStats {
            entries,
            capacity: self.overflow.capacity,
            sockets: self.overflow_stat(SOCKETS)?,
            refused: self.overflow_stat(REFUSED)?,
        })
    }

    fn delete_leaked(&mut self) -> Result<(), Error> {
        let entries = self.overflow.read()?;
        let mut deleted = BTreeMap::<u64, u64>::new();
        let mut result = Ok(());
        for (key, netns) in leaked(&entries) {
            match self.overflow.delete(key) {
                Ok(is_deleted) => *deleted.entry(netns).or_default() += u64::from(is_deleted),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        // Programs write the other statistics; only user space writes these.
        let total = self.overflow_stat(COLLECTED)? + deleted.values().sum::<u64>();
        self.overflow_stats.set(COLLECTED, total, 0).map_err(Error::map(OVERFLOW_STATS))?;
        let before = self.collected()?;
        for (netns, number) in deleted {
            let number = number + before.get(&netns).copied().unwrap_or(0);
            self.netns_collected.insert(&netns, &number)?;
        }
        result
    }

    /// The network namespaces that were refused, those with the most refusals first. Forgets those that use nothing any more.
    fn refused(&mut self, cgroup: &Path) -> Result<Vec<RefusedNamespace>, Error> {
        let now = [
            self.overflow_stat(INSERTED)?,
            self.overflow_stat(DELETED)?,
            self.overflow_stat(COLLECTED)?,
            self.overflow_stat(REFUSED)?,
        ];
        if now == self.read_at {
            return Ok(self.refused.clone());
        }
        self.read_at = now;
        let usage = self.netns_usage.read()?;
        let collected = self.collected()?;
        let before = std::mem::take(&mut self.usage);
        for (netns, usage) in usage {
            let removed = usage.deleted + collected.get(&netns).copied().unwrap_or(0);
            // A program may be about to insert an entry: only a namespace in which nothing has happened since is forgotten.
            if usage.inserted <= removed && before.get(&netns) == Some(&usage) {
                self.netns_usage.delete(&netns)?;
                self.netns_collected.delete(&netns)?;
            } else {
                self.usage.insert(netns, usage);
            }
        }
        let mut refused: Vec<_> = self.usage.iter().filter(|(_, it)| it.refused > 0).collect();
        refused.sort_unstable_by_key(|(netns, it)| (u64::MAX - it.refused, **netns));
        refused.truncate(MAX_REFUSED);
        let paths = cgroup::paths_of(cgroup, refused.iter().map(|(_, it)| it.cgroup));
        self.refused = refused
            .into_iter()
            .map(|(&netns, usage)| RefusedNamespace {
                netns,
                cgroup: paths.get(&usage.cgroup).cloned(),
                refused: usage.refused,
            })
            .collect();
        Ok(self.refused.clone())
    }

    fn collected(&self) -> Result<HashMap<u64, u64>, Error> {
        Ok(self.netns_collected.read()?.into_iter().collect())
    }

    fn overflow_stat(&self, index: u32) -> Result<u64, Error> {
        self.overflow_stats.get(&index, 0).map_err(Error::map(OVERFLOW_STATS))
    }
}
