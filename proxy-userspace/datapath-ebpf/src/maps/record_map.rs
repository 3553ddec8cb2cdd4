//! Maps that are read whole, and whose entries are deleted one by one.

use std::{io::ErrorKind, marker::PhantomData, os::fd::AsFd as _};

use aya::{
    Ebpf,
    maps::{Map, MapData},
};
use bytemuck::Pod;

use crate::{
    error::Error,
    host::raw_bpf::{self, EntrySize},
};

/// A hash map in the kernel, or an array that is only read.
#[derive(Debug)]
pub(crate) struct RecordMap<K, V> {
    map: MapData,
    name: String,
    capacity: u32,
    entries: PhantomData<(K, V)>,
}

impl<K: Pod, V: Pod> RecordMap<K, V> {
    const ENTRY: EntrySize = EntrySize::of::<K, V>();

    /// A map that is open; its entries have to be of `K` and `V`.
    pub(crate) fn new(map: MapData, name: impl ToString) -> Result<Self, Error> {
        let name = name.to_string();
        let capacity = map.info().map_err(Error::map(&name))?.max_entries();
        Ok(Self { map, name, capacity, entries: PhantomData })
    }

    /// Takes a hash map out of the loaded object.
    pub(crate) fn take(ebpf: &mut Ebpf, name: &str) -> Result<Self, Error> {
        match ebpf.take_map(name) {
            Some(Map::HashMap(map) | Map::LruHashMap(map)) => Self::new(map, name),
            _ => Err(Error::Incomplete(format!("map {name}"))),
        }
    }

    /// How many entries there may be.
    pub(crate) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// All entries.
    pub(crate) fn read(&self) -> Result<Vec<(K, V)>, Error> {
        let (keys, values) = raw_bpf::lookup_all(self.map.fd().as_fd(), Self::ENTRY, self.capacity)
            .map_err(Error::syscall("BPF_MAP_LOOKUP_BATCH", &self.name))?;
        let keys = keys.chunks_exact(Self::ENTRY.key).map(bytemuck::pod_read_unaligned);
        Ok(keys.zip(values.chunks_exact(Self::ENTRY.value).map(bytemuck::pod_read_unaligned)).collect())
    }

    /// Writes an entry.
    pub(crate) fn insert(&self, key: &K, value: &V) -> Result<(), Error> {
        let (key, value) = (bytemuck::bytes_of(key), bytemuck::bytes_of(value));
        raw_bpf::update_batch(self.map.fd().as_fd(), Self::ENTRY, key, value)
            .map_err(Error::syscall("BPF_MAP_UPDATE_BATCH", &self.name))
    }

    /// Replaces the value of a key, if it is still there.
    pub(crate) fn replace(&self, key: &K, value: &V) -> Result<(), Error> {
        match raw_bpf::replace(self.map.fd().as_fd(), key, value) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(Error::syscall("BPF_MAP_UPDATE_ELEM", &self.name)(error))
            }
            _ => Ok(()),
        }
    }

    /// Deletes an entry; whether there was one. One by one: a batch stops at the first missing key, and does not report how
    /// many it deleted.
    pub(crate) fn delete(&self, key: &K) -> Result<bool, Error> {
        match raw_bpf::delete_batch(self.map.fd().as_fd(), Self::ENTRY, bytemuck::bytes_of(key)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(Error::syscall("BPF_MAP_DELETE_BATCH", &self.name)(error)),
        }
    }
}
