//! Maps that are read whole, and whose entries are read, written and deleted one by one.

use std::{io::ErrorKind, marker::PhantomData, os::fd::AsFd as _, path::Path};

use aya::{
    Ebpf,
    maps::{Map, MapData},
};
use aya_obj::generated::BPF_EXIST;
use bytemuck::Pod;

use crate::{
    error::Error,
    host::raw_bpf::{self, Batch, Cursor, EntrySize},
    maps::bpf_maps,
};

/// How many values of an array are read at once.
const PAGE: u32 = 1 << 14;

/// A hash map in the kernel, or an array that is only read.
#[derive(Debug)]
pub(crate) struct RecordMap<K, V> {
    map: MapData,
    name: String,
    pub(crate) capacity: u32,
    entries: PhantomData<(K, V)>,
}

impl<K: Pod, V: Pod> RecordMap<K, V> {
    const ENTRY: EntrySize = EntrySize::of::<K, V>();

    /// A map that is open; its entries have to be of `K` and `V`.
    fn new(map: MapData, name: impl ToString) -> Result<Self, Error> {
        let name = name.to_string();
        let capacity = map.info().map_err(Error::map(&name))?.max_entries();
        Ok(Self { map, name, capacity, entries: PhantomData })
    }

    pub(crate) fn open(pin: &Path) -> Result<Self, Error> {
        Self::new(bpf_maps::open(pin, Self::ENTRY)?, pin.display())
    }

    /// Takes a hash map out of the loaded object.
    pub(crate) fn take(ebpf: &mut Ebpf, name: &str) -> Result<Self, Error> {
        match ebpf.take_map(name) {
            Some(Map::HashMap(map) | Map::LruHashMap(map)) => Self::new(map, name),
            _ => Err(Error::Incomplete(format!("map {name}"))),
        }
    }

    fn batch(&self, count: u32, cursor: &mut Cursor) -> Result<Batch, Error> {
        raw_bpf::lookup_batch(self.map.fd().as_fd(), Self::ENTRY, count, cursor)
            .map_err(Error::syscall("BPF_MAP_LOOKUP_BATCH", &self.name))
    }

    pub(crate) fn read(&self) -> Result<Vec<(K, V)>, Error> {
        let Batch { keys, values, .. } = self.batch(self.capacity, &mut Cursor::default())?;
        let keys = keys.chunks_exact(Self::ENTRY.key).map(bytemuck::pod_read_unaligned);
        Ok(keys.zip(values.chunks_exact(Self::ENTRY.value).map(bytemuck::pod_read_unaligned)).collect())
    }

    /// Calls a function with each value of an array, of which only a part is in memory at a time.
    pub(crate) fn each_value(&self, mut each: impl FnMut(V)) -> Result<(), Error> {
        let mut cursor = Cursor::default();
        loop {
            let batch = self.batch(self.capacity.min(PAGE), &mut cursor)?;
            let values = batch.values.chunks_exact(Self::ENTRY.value);
            values.map(bytemuck::pod_read_unaligned::<V>).for_each(&mut each);
            if batch.is_last {
                return Ok(());
            }
        }
    }

    pub(crate) fn get(&self, key: &K) -> Result<Option<V>, Error> {
        raw_bpf::lookup(self.map.fd().as_fd(), key).map_err(Error::syscall("BPF_MAP_LOOKUP_ELEM", &self.name))
    }

    pub(crate) fn insert(&self, key: &K, value: &V) -> Result<(), Error> {
        let (key, value) = (bytemuck::bytes_of(key), bytemuck::bytes_of(value));
        raw_bpf::update_batch(self.map.fd().as_fd(), Self::ENTRY, key, value)
            .map_err(Error::syscall("BPF_MAP_UPDATE_BATCH", &self.name))
    }

    /// Replaces the value of a key, if it is still there.
    pub(crate) fn replace(&self, key: &K, value: &V) -> Result<(), Error> {
        match raw_bpf::update(self.map.fd().as_fd(), key, value, BPF_EXIST) {
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
