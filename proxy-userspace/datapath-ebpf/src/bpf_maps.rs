//! The maps in the kernel: made or taken over through their pins, and written in batches.

use std::{
    os::fd::{AsFd as _, BorrowedFd},
    panic::resume_unwind,
    path::Path,
    sync::atomic::{Ordering, fence},
    thread,
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, ArrayOfMaps, Map, MapData},
};
use aya_obj::generated::{BPF_F_INNER_MAP, bpf_map_type};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use proxy_common::{
    counters::{CounterIndex, MAX_CHUNKS},
    tables::Prefilter,
};

use crate::{
    counter_maps::{self, Chunks},
    embedded,
    error::Error,
    exclusions, failpoint,
    features::Features,
    map_spec,
    options::Options,
    pins::{self, Pins},
    raw_bpf,
    store::{Side, Store, Table},
};

/// Where the side word is in `ACTIVE`.
const SIDE: u32 = 0;
/// Where flips are counted in `ACTIVE`, each before it happens; no program reads it.
const FLIPS: u32 = 1;

/// The maps of one data plane, in the kernel.
pub(super) struct KernelMaps {
    pins: Pins,
    active: Array<MapData, u32>,
    prefilters: MapData,
    outer: Vec<ArrayOfMaps<MapData, MapData>>,
    inner: [[Option<MapData>; Table::COUNT]; 2],
    counters: ArrayOfMaps<MapData, MapData>,
    chunks: Chunks,
    /// Read by no program: the kernel waits with every update of an outer map until each program that runs has ended
    /// (Linux 1ae80cf31938).
    grace: ArrayOfMaps<MapData, MapData>,
    grace_inner: MapData,
}

/// Loads the kernel object on top of the maps that are pinned, and returns it with the maps.
/// Nothing is attached yet, and nothing that serves is touched.
pub(super) fn load(pins: &Pins, options: &Options, features: Features) -> Result<(Ebpf, KernelMaps), Error> {
    // Map memory counts against this limit before Linux 5.11; where it cannot be raised, the load says so.
    let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
    let slots = map_spec::size(&pins.sock_nat_map("slots"), options.socket_slots, "sockets have slots")?;
    let clients = map_spec::size(
        &pins.affinity().join("affinity"),
        options.affinity_clients,
        "clients keep their endpoint",
    )?;
    let peers = map_spec::size(
        &pins.sock_nat_map("udp_nat"),
        options.udp_addresses.saturating_mul(2),
        "places are there for further addresses of UDP sockets",
    )?;
    let stripes = counter_maps::stripes(pins)?;
    let mut shared = map_spec::maps(pins, slots, clients, peers);
    shared.extend(counter_maps::pinned(pins, stripes));
    for map in &shared {
        map.check()?;
    }
    for table in Table::ALL {
        let template = || create_table(table, table.name(), 1);
        make_outer(table.map(), &pins.outer(table), 2, template)?;
    }
    make_outer(counter_maps::OUTER, &pins.chunks(), MAX_CHUNKS, || counter_maps::create(stripes))?;
    let excluded_levels = exclusions::levels(&options.excluded_cgroups)?;
    let host_only = u32::from(options.host_only);
    let slot_mask = slots - 1;
    let stripe_mask = stripes.saturating_sub(1);
    let protect_node_ports = u32::from(options.protect_node_ports);
    // A kernel that does not tell (before 5.14) is taken at its word that we are in the first namespace of all.
    let host_netns = raw_bpf::netns_cookie().unwrap_or(0);
    let seed = fastrand::u64(..);
    let mut loader = EbpfLoader::new();
    features.tell(&mut loader);
    loader.override_global("EXCLUDED_LEVELS", &excluded_levels, true);
    loader.override_global("HOST_ONLY", &host_only, true);
    loader.override_global("SLOT_MASK", &slot_mask, true);
    loader.override_global("STRIPE_MASK", &stripe_mask, true);
    loader.override_global("PROTECT_NODE_PORTS", &protect_node_ports, true);
    loader.override_global("HOST_NETNS", &host_netns, true);
    loader.override_global("SEED", &seed, true);
    loader.map_max_entries("SLOTS", slots);
    loader.map_max_entries("AFFINITY", clients);
    loader.map_max_entries("UDP_NAT", peers);
    // The chunks themselves are not maps of the object.
    for map in shared.iter().filter(|it| it.name != counter_maps::CHUNK) {
        loader.map_pin_path(map.name, map.path.clone());
    }
    let mut ebpf = loader.load(embedded::bytes()?).map_err(|it| Error::Load(Box::new(it)))?;
    let maps = KernelMaps::take(&mut ebpf, pins, stripes)?;
    Ok((ebpf, maps))
}

impl KernelMaps {
    fn take(ebpf: &mut Ebpf, pins: &Pins, stripes: u32) -> Result<Self, Error> {
        let mut map =
            |name: &str| ebpf.take_map(name).ok_or_else(|| Error::Incomplete(format!("map {name}")));
        let active = Array::try_from(map("ACTIVE")?).map_err(Error::map("ACTIVE"))?;
        let Map::Array(prefilters) = map("PREFILTER")? else {
            return Err(Error::Incomplete("map PREFILTER".into()));
        };
        let outer = Table::ALL
            .iter()
            .map(|table| ArrayOfMaps::try_from(map(table.map())?).map_err(Error::map(table.map())))
            .collect::<Result<_, _>>()?;
        let counters =
            ArrayOfMaps::try_from(map(counter_maps::OUTER)?).map_err(Error::map(counter_maps::OUTER))?;
        let chunks = Chunks::open(pins, stripes)?;
        let word = raw_bpf::Entry { key: size_of::<u32>(), value: size_of::<u32>() };
        let grace_inner = create("grace", bpf_map_type::BPF_MAP_TYPE_HASH, word, 1, 0)?;
        let grace = array_of_maps("grace", &grace_inner, 1)?;
        let grace = ArrayOfMaps::try_from(grace).map_err(Error::map("grace"))?;
        Ok(Self {
            pins: pins.clone(),
            active,
            prefilters,
            outer,
            inner: Default::default(),
            counters,
            chunks,
            grace,
            grace_inner,
        })
    }

    fn inner(&self, side: Side, table: Table) -> Result<BorrowedFd<'_>, Error> {
        // Every side is replaced before it is written, because nothing is known of it at first.
        let map = self.inner[side.index()][table.index()].as_ref();
        map.map(|it| it.fd().as_fd()).ok_or_else(|| Error::Incomplete(format!("map {table} on side {side}")))
    }
}

impl Store for KernelMaps {
    fn active(&self) -> Result<Side, Error> {
        let word = self.active.get(&SIDE, 0).map_err(Error::map("ACTIVE"))?;
        Side::from_word(word).ok_or(Error::SideWord(word))
    }

    fn activate(&mut self, side: Side) -> Result<(), Error> {
        let flips = self.active.get(&FLIPS, 0).map_err(Error::map("ACTIVE"))?;
        self.active.set(FLIPS, flips.wrapping_add(1), 0).map_err(Error::map("ACTIVE"))?;
        // The entries were stored by this thread inside earlier system calls. On a weakly ordered machine another CPU
        // could see the side word first; a program's own reads are ordered by their address dependency on it.
        // The two values of the word differ in one byte, so that no reader can see half of a store.
        fence(Ordering::SeqCst);
        self.active.set(SIDE, side.word(), 0).map_err(Error::map("ACTIVE"))
    }

    fn grace(&mut self) -> Result<(), Error> {
        self.grace.set(0, &self.grace_inner, 0).map_err(Error::map("grace"))
    }

    fn replace(&mut self, side: Side, maps: &[(Table, u32)]) -> Result<(), Error> {
        // By table; none for one that stays.
        let mut made = [const { None }; Table::COUNT];
        for &(table, capacity) in maps {
            let map = create_table(table, &format!("{table}_{side}"), capacity)?;
            pins::replace(&self.pins.inner(side, table), |path| map.pin(path).map_err(Error::pin(path)))?;
            made[table.index()] = Some(map);
        }
        // The kernel waits for a grace period after each, which is the same one for all that come at a time.
        let slots = Table::ALL.into_iter().zip(&mut self.outer).zip(&made);
        in_parallel(slots.filter_map(|((table, outer), map)| {
            let map = map.as_ref()?;
            Some(move || outer.set(side.word(), map, 0).map_err(Error::map(table.map())))
        }))?;
        for (inner, map) in self.inner[side.index()].iter_mut().zip(made) {
            *inner = map.or(inner.take());
        }
        Ok(())
    }

    fn set_prefilter(&mut self, side: Side, prefilter: &Prefilter) -> Result<(), Error> {
        let entry = raw_bpf::Entry { key: size_of::<u32>(), value: size_of::<Prefilter>() };
        let (key, value) = (side.word(), bytemuck::bytes_of(prefilter));
        raw_bpf::update_batch(self.prefilters.fd().as_fd(), entry, bytemuck::bytes_of(&key), value)
            .map_err(Error::syscall("BPF_MAP_UPDATE_BATCH", "prefilter"))
    }

    fn put(&mut self, side: Side, table: Table, keys: &[u8], values: &[u8]) -> Result<(), Error> {
        let map = self.inner(side, table)?;
        let entry = entry(table);
        if cfg!(feature = "fault-points") {
            // The first half alone, as if the process had died inside the batch.
            let half = keys.len() / entry.key / 2;
            raw_bpf::update_batch(map, entry, &keys[..half * entry.key], &values[..half * entry.value])
                .map_err(Error::syscall("BPF_MAP_UPDATE_BATCH", table))?;
            failpoint::point("mid-batch");
        }
        raw_bpf::update_batch(map, entry, keys, values).map_err(Error::syscall("BPF_MAP_UPDATE_BATCH", table))
    }

    fn delete(&mut self, side: Side, table: Table, keys: &[u8]) -> Result<(), Error> {
        raw_bpf::delete_batch(self.inner(side, table)?, entry(table), keys)
            .map_err(Error::syscall("BPF_MAP_DELETE_BATCH", table))
    }

    fn owners(&self) -> Result<Vec<u64>, Error> {
        self.chunks.owners()
    }

    fn own(&mut self, cells: &[(CounterIndex, u64)]) -> Result<(), Error> {
        self.chunks.own(cells, &mut self.counters)
    }
}

/// Does all of it at the same time, the first in this thread; returns when all is done.
fn in_parallel(
    mut work: impl Iterator<Item = impl FnOnce() -> Result<(), Error> + Send>,
) -> Result<(), Error> {
    let Some(own) = work.next() else { return Ok(()) };
    thread::scope(|scope| {
        let start =
            |it| thread::Builder::new().spawn_scoped(scope, it).map_err(Error::syscall("clone", "a thread"));
        let others = work.map(start).collect::<Result<Vec<_>, _>>()?;
        let own = own();
        let others = others.into_iter().map(|it| it.join().unwrap_or_else(|it| resume_unwind(it)));
        others.fold(own, Result::and)
    })
}

/// The sizes of a table's entries.
pub(super) fn entry(table: Table) -> raw_bpf::Entry {
    raw_bpf::Entry { key: table.key_size(), value: table.value_size() }
}

/// Makes one side's map of a table, of a kind and with flags as the template in the kernel object has, which the kernel
/// compares. A hash map is preallocated; an array may have more entries than the template (Linux 4a8f87e60f6d, 5.10).
fn create_table(table: Table, name: &str, capacity: u32) -> Result<MapData, Error> {
    let (kind, flags) = match table.is_array() {
        true => (bpf_map_type::BPF_MAP_TYPE_ARRAY, BPF_F_INNER_MAP),
        false => (bpf_map_type::BPF_MAP_TYPE_HASH, 0),
    };
    create(name, kind, entry(table), capacity, flags)
}

fn create(
    name: &str,
    kind: bpf_map_type,
    entry: raw_bpf::Entry,
    capacity: u32,
    flags: u32,
) -> Result<MapData, Error> {
    let map =
        aya_obj::Map::new_from_params(kind as u32, entry.key as u32, entry.value as u32, capacity, flags);
    MapData::create(map, name, None).map_err(Error::map(name))
}

/// Pins an outer map, if it is not there yet.
///
/// aya would make one with a template that has BTF, and Linux 5.15 to 6.2 accepts no inner map without BTF there (it
/// compares where the timer is, which is "nowhere" in two ways). Ours has none, like the maps that are put in.
fn make_outer(
    name: &str,
    path: &Path,
    slots: u32,
    template: impl FnOnce() -> Result<MapData, Error>,
) -> Result<(), Error> {
    if path.exists() {
        return Ok(());
    }
    array_of_maps(name, &template()?, slots)?.pin(path).map_err(Error::pin(path))
}

/// Makes an outer map for inner maps like `template`.
fn array_of_maps(name: &str, template: &MapData, slots: u32) -> Result<Map, Error> {
    let fd = raw_bpf::create_array_of_maps(name, template.fd().as_fd(), slots)
        .map_err(Error::syscall("BPF_MAP_CREATE", name))?;
    MapData::from_fd(fd).and_then(Map::from_map_data).map_err(Error::map(name))
}

/// Whether a generation of this layout was ever in force. What cannot be looked at is an error, and no "no".
pub(super) fn is_filled(pins: &Pins) -> Result<bool, Error> {
    let exists = |path: &Path| path.try_exists().map_err(Error::syscall("stat", path.display()));
    if !exists(&pins.active())? {
        return Ok(false);
    }
    let (side, flips) = read_active(pins)?;
    for table in Table::ALL {
        if !exists(&pins.inner(side, table))? {
            return Ok(false);
        }
    }
    Ok(flips > 0)
}

/// Reads a map by its pin, for `dump`: its keys and values, one after the other.
pub(super) fn read(path: &Path, entry: raw_bpf::Entry) -> Result<(Vec<u8>, Vec<u8>), Error> {
    let map = map_spec::get(path)?;
    let info = map.info().map_err(Error::map(path.display()))?;
    let sizes = (info.key_size() as usize, info.value_size() as usize);
    if sizes != (entry.key, entry.value) {
        return Err(Error::ForeignPin {
            path: path.to_path_buf(),
            found: format!("a map with keys of {} and values of {} bytes", sizes.0, sizes.1),
            expected: format!("keys of {} and values of {} bytes", entry.key, entry.value),
        });
    }
    raw_bpf::lookup_all(map.fd().as_fd(), entry, info.max_entries())
        .map_err(Error::syscall("BPF_MAP_LOOKUP_BATCH", path.display()))
}

/// Reads the side word and the count of flips by their pin, for `dump`.
pub(super) fn read_active(pins: &Pins) -> Result<(Side, u32), Error> {
    let path = pins.active();
    let array = Map::from_map_data(map_spec::get(&path)?).and_then(Array::try_from);
    let array: Array<MapData, u32> = array.map_err(Error::map(path.display()))?;
    let word = array.get(&SIDE, 0).map_err(Error::map(path.display()))?;
    let flips = array.get(&FLIPS, 0).map_err(Error::map(path.display()))?;
    Ok((Side::from_word(word).ok_or(Error::SideWord(word))?, flips))
}
