//! The maps of the kernel object that are taken over through their pins, and what each of them must be.
//!
//! The one rule: nothing that is pinned is used before its shape was compared.

use std::{
    fmt,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use aya::maps::{MapData, MapType};
use aya_obj::generated::BPF_F_NO_PREALLOC;
use proxy_common::{
    affinity::{AffinityEntry, AffinityKey},
    sock_nat::{ConnectedNat, NatSlot},
    tables::Prefilter,
    udp_nat::{STAT_COUNT, UdpNatEntry, UdpNatKey},
    udp_nat_cache::UdpNatCache,
};

use crate::{error::Error, pins::Pins, raw_bpf, store::Table};

/// A map of the kernel object that is pinned, and what must be there if its pin is.
pub(super) struct Pinned {
    /// Its name in the kernel object.
    pub(super) name: &'static str,
    /// Where.
    pub(super) path: PathBuf,
    /// What must be there.
    pub(super) shape: Shape,
}

impl Pinned {
    /// aya 0.14 takes whatever is pinned without a look; a map of another shape would have the kernel write past our
    /// buffers.
    pub(super) fn check(&self) -> Result<(), Error> {
        let fd = match raw_bpf::obj_get(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            fd => fd.map_err(Error::syscall("BPF_OBJ_GET", self.path.display()))?,
        };
        let info = MapData::from_fd(fd).and_then(|it| it.info());
        let found = info.and_then(|it| {
            Ok(Shape {
                map_type: it.map_type()?,
                key_size: it.key_size(),
                value_size: it.value_size(),
                max_entries: it.max_entries(),
                flags: it.map_flags(),
            })
        });
        match found {
            Ok(found) if found == self.shape => Ok(()),
            found => Err(Error::ForeignPin {
                path: self.path.clone(),
                found: found.map_or_else(|_| "something that is not a map".into(), |it| it.to_string()),
                expected: self.shape.to_string(),
            }),
        }
    }
}

/// What makes two maps interchangeable.
#[derive(Debug, PartialEq)]
pub(super) struct Shape {
    pub(super) map_type: MapType,
    pub(super) key_size: u32,
    pub(super) value_size: u32,
    pub(super) max_entries: u32,
    pub(super) flags: u32,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { map_type, key_size, value_size, max_entries, flags } = self;
        write!(
            f,
            "a map of type {map_type:?} with keys of {key_size} and values of {value_size} bytes, \
             {max_entries} entries and flags {flags:#x}"
        )
    }
}

/// A map by its pin.
pub(super) fn get(pin: &Path) -> Result<MapData, Error> {
    let fd = raw_bpf::obj_get(pin).map_err(Error::syscall("BPF_OBJ_GET", pin.display()))?;
    MapData::from_fd(fd).map_err(Error::map(pin.display()))
}

/// The same, if there is one.
pub(super) fn find(pin: &Path) -> Result<Option<MapData>, Error> {
    match get(pin) {
        Err(Error::Syscall { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        map => map.map(Some),
    }
}

/// How many entries a map has that cannot be moved: as many as when it was made.
pub(super) fn size(path: &Path, wanted: u32, what: &str) -> Result<u32, Error> {
    let Some(map) = find(path)? else { return Ok(wanted) };
    let there = map.info().map_err(Error::map(path.display()))?.max_entries();
    if there != wanted {
        tracing::info!("{there} {what}, not {wanted}, until `cleanup` takes them away");
    }
    // A foreign map is found out when its shape is checked.
    Ok(if there.is_power_of_two() { there } else { wanted })
}

/// Every map that programs and user space share, but the chunks of counters.
pub(super) fn maps(pins: &Pins, slots: u32, clients: u32, peers: u32) -> Vec<Pinned> {
    let word = size_of::<u32>() as u32;
    let shape = |map_type, value_size, max_entries, flags| Shape {
        map_type,
        key_size: word,
        value_size,
        max_entries,
        flags,
    };
    let storage = |value: usize| shape(MapType::SkStorage, value as u32, 0, BPF_F_NO_PREALLOC);
    let mut maps = vec![
        Pinned { name: "ACTIVE", path: pins.active(), shape: shape(MapType::Array, word, 2, 0) },
        Pinned {
            name: "PREFILTER",
            path: pins.prefilters(),
            shape: shape(MapType::Array, size_of::<Prefilter>() as u32, 2, 0),
        },
        Pinned {
            name: "SLOTS",
            path: pins.sock_nat_map("slots"),
            shape: shape(MapType::Array, size_of::<NatSlot>() as u32, slots, 0),
        },
        Pinned {
            name: "AFFINITY",
            path: pins.affinity().join("affinity"),
            shape: Shape {
                map_type: MapType::LruHash,
                key_size: size_of::<AffinityKey>() as u32,
                value_size: size_of::<AffinityEntry>() as u32,
                max_entries: clients,
                flags: 0,
            },
        },
        Pinned {
            name: "AFFINITY_INSERTS",
            path: pins.affinity().join("affinity_inserts"),
            shape: shape(MapType::Array, size_of::<u64>() as u32, 1, 0),
        },
        Pinned {
            name: "SLOT_OVERFLOWS",
            path: pins.sock_nat_map("slot_overflows"),
            shape: shape(MapType::Array, size_of::<u64>() as u32, 1, 0),
        },
        Pinned {
            name: "SK_NAT",
            path: pins.sock_nat_map("sk_nat"),
            shape: storage(size_of::<ConnectedNat>()),
        },
        Pinned {
            name: "UDP_SK_NAT",
            path: pins.sock_nat_map("udp_sk_nat"),
            shape: storage(size_of::<UdpNatCache>()),
        },
        Pinned {
            name: "UDP_NAT",
            path: pins.sock_nat_map("udp_nat"),
            shape: Shape {
                map_type: MapType::Hash,
                key_size: size_of::<UdpNatKey>() as u32,
                value_size: size_of::<UdpNatEntry>() as u32,
                max_entries: peers,
                flags: BPF_F_NO_PREALLOC,
            },
        },
        Pinned {
            name: "UDP_NAT_STATS",
            path: pins.sock_nat_map("udp_nat_stats"),
            shape: shape(MapType::Array, size_of::<u64>() as u32, STAT_COUNT, 0),
        },
    ];
    maps.extend(Table::ALL.map(|table| Pinned {
        name: table.map(),
        path: pins.outer(table),
        shape: shape(MapType::ArrayOfMaps, word, 2, 0),
    }));
    maps
}
