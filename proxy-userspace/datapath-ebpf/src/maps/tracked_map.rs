//! Hash maps that this process alone writes.
//!
//! Invariant: what they contain is known, and only what differs is written.

use std::collections::BTreeMap;

use aya::{
    Ebpf, Pod,
    maps::{HashMap, MapData},
};

use crate::{error::Error, maps::map_spec};

pub(crate) struct TrackedMap<K> {
    map: HashMap<MapData, K, u32>,
    name: &'static str,
    entries: BTreeMap<K, u32>,
}

impl<K: Pod + Ord> TrackedMap<K> {
    /// Takes the map, which is empty, out of the loaded object.
    pub(crate) fn take(ebpf: &mut Ebpf, name: &'static str) -> Result<Self, Error> {
        Ok(Self { map: map_spec::take(ebpf, name)?, name, entries: BTreeMap::new() })
    }

    /// Makes it the same as another one.
    pub(crate) fn mirror(&mut self, other: &Self) -> Result<(), Error> {
        self.set(other.entries.clone())
    }

    /// Writes what differs.
    pub(crate) fn set(&mut self, entries: BTreeMap<K, u32>) -> Result<(), Error> {
        let gone: Vec<_> = self.entries.keys().filter(|it| !entries.contains_key(it)).copied().collect();
        for key in gone {
            self.map.remove(&key).map_err(Error::map(self.name))?;
            self.entries.remove(&key);
        }
        for (key, value) in entries {
            if self.entries.get(&key) != Some(&value) {
                self.map.insert(key, value, 0).map_err(Error::map(self.name))?;
                self.entries.insert(key, value);
            }
        }
        Ok(())
    }
}
