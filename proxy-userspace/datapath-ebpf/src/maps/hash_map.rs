//! Hash maps that are read whole, and whose entries are deleted one by one.

use std::{io::ErrorKind, os::fd::AsFd as _};

use aya::maps::MapData;

use crate::{
    error::Error,
    host::raw_bpf::{self, EntrySize},
};

/// All entries of a hash map.
pub(crate) fn read_all<K: bytemuck::AnyBitPattern, V: bytemuck::AnyBitPattern>(
    map: &MapData,
    capacity: u32,
    name: &str,
) -> Result<Vec<(K, V)>, Error> {
    let size = EntrySize::of::<K, V>();
    let (keys, values) = raw_bpf::lookup_all(map.fd().as_fd(), size, capacity)
        .map_err(Error::syscall("BPF_MAP_LOOKUP_BATCH", name))?;
    let keys = keys.chunks_exact(size.key).map(bytemuck::pod_read_unaligned);
    Ok(keys.zip(values.chunks_exact(size.value).map(bytemuck::pod_read_unaligned)).collect())
}

/// Replaces the value of a key, if it is still there.
pub(crate) fn replace<K: bytemuck::NoUninit, V: bytemuck::NoUninit>(
    map: &MapData,
    key: &K,
    value: &V,
    name: &str,
) -> Result<(), Error> {
    match raw_bpf::replace(map.fd().as_fd(), key, value) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Error::syscall("BPF_MAP_UPDATE_ELEM", name)(error))
        }
        _ => Ok(()),
    }
}

/// Deletes an entry of a hash map; whether there was one. One by one: a batch stops at the first missing key, and does not
/// report how many it deleted.
pub(crate) fn delete<K: bytemuck::NoUninit, V>(map: &MapData, key: &K, name: &str) -> Result<bool, Error> {
    match raw_bpf::delete_batch(map.fd().as_fd(), EntrySize::of::<K, V>(), bytemuck::bytes_of(key)) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(Error::syscall("BPF_MAP_DELETE_BATCH", name)(error)),
    }
}
