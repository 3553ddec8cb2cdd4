//! The pinned maps of the kernel object, and the specification that each must match.
//!
//! Invariant: no pinned map is used before it was compared with its specification.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use aya::{
    Ebpf,
    maps::{Map, MapData, MapError, MapType},
};
use aya_obj::generated::BPF_F_NO_PREALLOC;
use proxy_common::{
    affinity::{AffinityEntry, AffinityKey},
    health::{FailureKey, FailureRecord, MAX_RECORDS, WORDS},
    overflow::{MAX_NETNS, NetnsUsage, OverflowEntry, OverflowKey, STAT_COUNT},
    senders::{MAX_SENDERS, SenderKey},
    sock_nat::{NatSlot, SLOT_SHARE_CELLS},
    tables::Prefilter,
};

use crate::{
    error::Error,
    host::raw_bpf::{self, EntrySize},
    maps::pins::{self, Pins},
    tables::store::Table,
};

/// A pinned map of the kernel object.
pub(crate) struct PinnedMap {
    /// Its name in the kernel object.
    pub(crate) name: &'static str,
    pub(crate) path: PathBuf,
    pub(crate) spec: MapSpec,
}

impl PinnedMap {
    /// Checks the map that is pinned, if there is one.
    ///
    /// aya 0.14 reuses a pinned map without a check; with another specification the kernel would write past our buffers.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let Some(fd) = pins::open(&self.path)? else { return Ok(()) };
        let info = MapData::from_fd(fd).and_then(|it| it.info());
        let found = info.and_then(|it| {
            let entry = EntrySize { key: it.key_size() as usize, value: it.value_size() as usize };
            Ok(MapSpec::new(it.map_type()?, entry, it.max_entries(), it.map_flags()))
        });
        match found {
            Ok(found) if found == self.spec => Ok(()),
            found => Err(Error::ForeignPin {
                path: self.path.clone(),
                found: found.map_or_else(|_| "something that is not a map".into(), |it| it.to_string()),
                expected: self.spec.to_string(),
            }),
        }
    }
}

/// What makes two maps interchangeable.
#[derive(Debug, PartialEq)]
pub(crate) struct MapSpec {
    map_type: MapType,
    entry: EntrySize,
    pub(crate) max_entries: u32,
    flags: u32,
}

impl MapSpec {
    pub(crate) fn new(map_type: MapType, entry: EntrySize, max_entries: u32, flags: u32) -> Self {
        Self { map_type, entry, max_entries, flags }
    }

    pub(crate) fn create(&self, name: &str) -> Result<MapData, Error> {
        let Self { map_type, entry: EntrySize { key, value }, max_entries, flags } = *self;
        let map =
            aya_obj::Map::new_from_params(map_type as u32, key as u32, value as u32, max_entries, flags);
        MapData::create(map, name, None).map_err(Error::map(name))
    }
}

impl fmt::Display for MapSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { map_type, entry: EntrySize { key, value }, max_entries, flags } = self;
        write!(
            f,
            "a map of type {map_type:?} with keys of {key} and values of {value} bytes, \
             {max_entries} entries and flags {flags:#x}"
        )
    }
}

pub(crate) fn get(pin: &Path) -> Result<MapData, Error> {
    let fd = raw_bpf::obj_get(pin).map_err(Error::syscall("BPF_OBJ_GET", pin.display()))?;
    MapData::from_fd(fd).map_err(Error::map(pin.display()))
}

pub(crate) fn find(pin: &Path) -> Result<Option<MapData>, Error> {
    pins::open(pin)?.map(|it| MapData::from_fd(it).map_err(Error::map(pin.display()))).transpose()
}

/// Opens a pinned map as one of a certain type.
pub(crate) fn open<M: TryFrom<Map, Error = MapError>>(pin: &Path) -> Result<M, Error> {
    Map::from_map_data(get(pin)?).and_then(M::try_from).map_err(Error::map(pin.display()))
}

/// Takes a map of a certain type out of the loaded object.
pub(crate) fn take<M: TryFrom<Map, Error = MapError>>(ebpf: &mut Ebpf, name: &str) -> Result<M, Error> {
    let map = ebpf.take_map(name).ok_or_else(|| Error::Incomplete(format!("map {name}")))?;
    M::try_from(map).map_err(Error::map(name))
}

/// The capacity of a map whose entries outlast upgrades: that of the pinned map, if there is one.
pub(crate) fn capacity(path: &Path, wanted: u32, what: &str) -> Result<u32, Error> {
    let Some(map) = find(path)? else { return Ok(wanted) };
    let pinned = map.info().map_err(Error::map(path.display()))?.max_entries();
    if pinned != wanted {
        tracing::info!(map = what, capacity = pinned, wanted, "the map keeps its capacity until `cleanup`");
    }
    // A foreign map is rejected when its specification is checked.
    Ok(if pinned.is_power_of_two() { pinned } else { wanted })
}

/// Every map that programs and user space share, except the chunks of counters.
pub(crate) fn maps(pins: &Pins, slots: u32, affinity_clients: u32, overflow: u32) -> Vec<PinnedMap> {
    fn array<V>(max_entries: u32) -> MapSpec {
        MapSpec::new(MapType::Array, EntrySize::of::<u32, V>(), max_entries, 0)
    }
    fn hash<K, V>(max_entries: u32) -> MapSpec {
        MapSpec::new(MapType::Hash, EntrySize::of::<K, V>(), max_entries, BPF_F_NO_PREALLOC)
    }
    fn lru<K, V>(max_entries: u32) -> MapSpec {
        MapSpec::new(MapType::LruHash, EntrySize::of::<K, V>(), max_entries, 0)
    }
    let affinity = lru::<AffinityKey, AffinityEntry>(affinity_clients);
    let maps = [
        ("ACTIVE", pins.active(), array::<u32>(2)),
        ("PREFILTER", pins.layout().join("prefilter"), array::<Prefilter>(2)),
        ("SLOTS", pins.sock_nat_map("slots"), array::<NatSlot>(slots)),
        ("PACKET_PATH", pins.layout().join("packet_path"), array::<u32>(1)),
        ("SENDERS", pins.sock_nat_map("senders"), lru::<SenderKey, u64>(MAX_SENDERS)),
        ("AFFINITY", pins.affinity().join("affinity"), affinity),
        ("AFFINITY_INSERTS", pins.affinity().join("affinity_inserts"), array::<u64>(1)),
        ("FAILURES", pins.health().join("failures"), lru::<FailureKey, FailureRecord>(MAX_RECORDS)),
        ("HEALTH", pins.health().join("health"), array::<u64>(WORDS)),
        ("SLOT_SHARES", pins.sock_nat_map("slot_shares"), array::<u64>(SLOT_SHARE_CELLS)),
        ("OVERFLOW", pins.sock_nat_map("overflow"), hash::<OverflowKey, OverflowEntry>(overflow)),
        ("OVERFLOW_STATS", pins.sock_nat_map("overflow_stats"), array::<u64>(STAT_COUNT)),
        ("NETNS_USAGE", pins.sock_nat_map("netns_usage"), hash::<u64, NetnsUsage>(MAX_NETNS)),
        ("NETNS_COLLECTED", pins.sock_nat_map("netns_collected"), hash::<u64, u64>(MAX_NETNS)),
    ];
    let outer = || MapSpec::new(MapType::ArrayOfMaps, EntrySize::of::<u32, u32>(), 2, 0);
    let tables = Table::ALL.into_iter().map(|it| (it.map(), pins.outer(it), outer()));
    maps.into_iter().chain(tables).map(|(name, path, spec)| PinnedMap { name, path, spec }).collect()
}
