//! The maps in the kernel: created, or taken over through their pins, and written in batches.

use std::{
    os::fd::{AsFd as _, BorrowedFd},
    panic::resume_unwind,
    path::Path,
    sync::atomic::{Ordering, fence},
    thread,
    time::Duration,
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, ArrayOfMaps, Map, MapData, MapType},
};
use aya_obj::generated::BPF_F_INNER_MAP;
use log::Level;
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use proxy_common::{
    counters::{CounterIndex, MAX_CHUNKS},
    exclusion::{MAX_EXCLUDED, MAX_EXCLUDED_PODS},
    tables::Prefilter,
};

use crate::{
    error::Error,
    host::{
        cgroup::Cgroup,
        failpoint,
        grace_period::GracePeriods,
        raw_bpf::{self, EntrySize},
    },
    maps::{
        counter_maps::{self, CounterChunks},
        embedded, exclusions,
        features::Features,
        map_spec::{self, MapSpec},
        pins::{self, Pins},
        program_log,
    },
    options::Options,
    tables::store::{MapStore, Side, Table},
};

/// The index of the active-side word in `ACTIVE`.
const SIDE: u32 = 0;
/// The index of the number of flips in `ACTIVE`, which counts each flip before it happens; programs do not read it.
const FLIPS: u32 = 1;

pub(crate) struct BpfMaps {
    pins: Pins,
    active: Array<MapData, u32>,
    prefilters: MapData,
    outer: Vec<ArrayOfMaps<MapData, MapData>>,
    inner: [[Option<MapData>; Table::COUNT]; 2],
    pub(crate) chunks: CounterChunks,
    /// Not used by programs: an update of any outer map returns only when every running program has ended
    /// (Linux 1ae80cf31938).
    grace: ArrayOfMaps<MapData, MapData>,
    grace_inner: MapData,
    grace_periods: GracePeriods,
}

/// Loads a kernel object with the pinned maps. `constants` are set beside those that every object has. Programs that are built
/// with lines of log say those up to `log_level`.
pub(crate) fn load_object(
    pins: &Pins,
    options: &Options,
    features: Features,
    object: &[u8],
    constants: &[(&'static str, u64)],
    log_level: Option<Level>,
) -> Result<Ebpf, Error> {
    // Map memory counts against this limit before Linux 5.11; if it cannot be raised, a later error reports it.
    let _ = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
    let slots =
        map_spec::capacity(&pins.sock_nat_map("slots"), options.socket_slots, "the table of socket slots")?;
    let affinity_clients = map_spec::capacity(
        &pins.affinity().join("affinity"),
        options.affinity_clients,
        "the session affinity table",
    )?;
    let overflow = map_spec::capacity(
        &pins.sock_nat_map("overflow"),
        options.udp_addresses.saturating_mul(2),
        "the socket overflow table",
    )?;
    let stripes = counter_maps::stripes(pins)?;
    let mut shared = map_spec::maps(pins, slots, affinity_clients, overflow);
    shared.extend(counter_maps::pinned_maps(pins, stripes));
    for map in &shared {
        map.check()?;
    }
    for table in Table::ALL {
        let template = || table_spec(table, 1).create(table.name());
        pin_outer(table.map(), &pins.outer(table), 2, template)?;
    }
    pin_outer(counter_maps::OUTER, &pins.chunks(), MAX_CHUNKS, || counter_maps::create(stripes))?;
    let mut excluded_levels = exclusions::levels(&options.excluded_cgroups)?;
    let mut max_excluded = MAX_EXCLUDED;
    if options.pod_annotations {
        excluded_levels |= exclusions::pod_levels(&Cgroup::open(options.cgroup.as_deref())?.path);
        max_excluded += MAX_EXCLUDED_PODS;
    }
    let words: [(&str, u32); 7] = [
        ("EXCLUDED_LEVELS", excluded_levels),
        ("HOST_ONLY", options.host_only.into()),
        ("SLOT_MASK", slots - 1),
        ("OVERFLOW_CAPACITY", overflow),
        ("STRIPE_MASK", stripes.saturating_sub(1)),
        ("PROTECT_NODE_PORTS", options.protect_node_ports.into()),
        ("FORWARDING_PORT", options.forwarding_port.to_be().into()),
    ];
    let numbers = [
        // Before Linux 5.14 there is no cookie: 0 stands for the initial namespace.
        ("HOST_NETNS", raw_bpf::netns_cookie().unwrap_or(0)),
        ("SEED", fastrand::u64(..)),
        ("EJECTION_TIME", nanoseconds(options.passive_health.ejection_time)),
        ("MAX_EJECTION_TIME", nanoseconds(options.passive_health.max_ejection_time)),
    ];
    let mut loader = EbpfLoader::new();
    features.apply_to(&mut loader);
    for (name, value) in &words {
        loader.override_global(name, value, true);
    }
    for (name, value) in numbers.iter().chain(constants) {
        loader.override_global(name, value, true);
    }
    let slow = u32::from(failpoint::is_enabled("slow-programs"));
    if cfg!(feature = "fault-points") {
        loader.override_global("SLOW", &slow, true);
    }
    loader.map_max_entries("EXCLUDED", max_excluded);
    // The chunks are not maps of the object.
    for map in shared.into_iter().filter(|it| it.name != counter_maps::CHUNK) {
        loader.map_max_entries(map.name, map.spec.max_entries).map_pin_path(map.name, map.path);
    }
    // aya-log has the same numbers.
    let log_level = log_level.map_or(0, |it| it as u8);
    loader.override_global(aya_log::LEVEL, &log_level, false);
    if log_level != 0 {
        loader.map_max_entries("AYA_LOGS", program_log::RING_BYTES);
    }
    let linked = features.link(object);
    loader.load(&bytemuck::cast_slice(&linked)[..object.len()]).map_err(|it| Error::Load(Box::new(it)))
}

/// Nanoseconds, as programs count.
fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl BpfMaps {
    /// Loads the kernel object with the pinned maps, and returns both. Nothing is attached, and no active map is changed.
    pub(crate) fn load(pins: &Pins, options: &Options, features: Features) -> Result<(Ebpf, Self), Error> {
        let mut ebpf = load_object(pins, options, features, embedded::bytes()?, &[], program_log::level())?;
        let grace_periods = GracePeriods::new(&options.rcu_expedited);
        let active = map_spec::take(&mut ebpf, "ACTIVE")?;
        let Some(Map::Array(prefilters)) = ebpf.take_map("PREFILTER") else {
            return Err(Error::Incomplete("map PREFILTER".into()));
        };
        let outer =
            Table::ALL.iter().map(|it| map_spec::take(&mut ebpf, it.map())).collect::<Result<_, _>>()?;
        let chunks = CounterChunks::open(pins, counter_maps::stripes(pins)?)?;
        let grace_inner = MapSpec::new(MapType::Hash, EntrySize::of::<u32, u32>(), 1, 0).create("grace")?;
        let grace = array_of_maps("grace", &grace_inner, 1)?;
        let grace = ArrayOfMaps::try_from(grace).map_err(Error::map("grace"))?;
        let maps = Self {
            pins: pins.clone(),
            active,
            prefilters,
            outer,
            inner: Default::default(),
            chunks,
            grace,
            grace_inner,
            grace_periods,
        };
        Ok((ebpf, maps))
    }

    fn inner(&self, side: Side, table: Table) -> Result<BorrowedFd<'_>, Error> {
        // Every map is created by `replace` before it is written, because the contents of a pinned one are unknown.
        let map = self.inner[side.index()][table.index()].as_ref();
        map.map(|it| it.fd().as_fd()).ok_or_else(|| Error::Incomplete(format!("map {table} on side {side}")))
    }
}

impl MapStore for BpfMaps {
    fn active(&self) -> Result<Side, Error> {
        active_words(&self.active).map(|(side, _)| side)
    }

    fn activate(&mut self, side: Side) -> Result<(), Error> {
        let flips = self.active.get(&FLIPS, 0).map_err(Error::map("ACTIVE"))?;
        self.active.set(FLIPS, flips.wrapping_add(1), 0).map_err(Error::map("ACTIVE"))?;
        // The entries were stored by this thread inside earlier system calls. On a weakly ordered machine another CPU
        // could see the active-side word first; a program's own reads are ordered by their address dependency on it.
        // The two values of the word differ in one byte, so that no reader can see a torn store.
        fence(Ordering::SeqCst);
        self.active.set(SIDE, side.word(), 0).map_err(Error::map("ACTIVE"))
    }

    fn wait_grace_period(&mut self) -> Result<(), Error> {
        let Self { grace, grace_inner, grace_periods, .. } = self;
        grace_periods.shortened(|| grace.set(0, &*grace_inner, 0)).map_err(Error::map("grace"))
    }

    fn replace(&mut self, side: Side, maps: &[(Table, u32)]) -> Result<(), Error> {
        // By table; `None` for a map that stays.
        let mut created = [const { None }; Table::COUNT];
        for &(table, capacity) in maps {
            let map = table_spec(table, capacity).create(&format!("{table}_{side}"))?;
            pins::replace(&self.pins.inner(side, table), |path| map.pin(path).map_err(Error::pin(path)))?;
            created[table.index()] = Some(map);
        }
        // The kernel waits for a grace period after each update; concurrent updates share one.
        let updates = Table::ALL.into_iter().zip(&mut self.outer).zip(&created);
        let updates = updates.filter_map(|((table, outer), map)| {
            let map = map.as_ref()?;
            Some(move || outer.set(side.word(), map, 0).map_err(Error::map(table.map())))
        });
        self.grace_periods.shortened(|| in_parallel(updates))?;
        for (inner, map) in self.inner[side.index()].iter_mut().zip(created) {
            *inner = map.or(inner.take());
        }
        Ok(())
    }

    fn set_prefilter(&mut self, side: Side, prefilter: &Prefilter) -> Result<(), Error> {
        let entry = EntrySize::of::<u32, Prefilter>();
        let (key, value) = (side.word(), bytemuck::bytes_of(prefilter));
        raw_bpf::update_batch(self.prefilters.fd().as_fd(), entry, bytemuck::bytes_of(&key), value)
            .map_err(Error::syscall("BPF_MAP_UPDATE_BATCH", "prefilter"))
    }

    fn put(&mut self, side: Side, table: Table, keys: &[u8], values: &[u8]) -> Result<(), Error> {
        let map = self.inner(side, table)?;
        let entry = table.entry();
        if cfg!(feature = "fault-points") {
            // Writes the first half, as if the process had died inside the batch.
            let half = keys.len() / entry.key / 2;
            raw_bpf::update_batch(map, entry, &keys[..half * entry.key], &values[..half * entry.value])
                .map_err(Error::syscall("BPF_MAP_UPDATE_BATCH", table))?;
            failpoint::point("mid-batch");
        }
        raw_bpf::update_batch(map, entry, keys, values).map_err(Error::syscall("BPF_MAP_UPDATE_BATCH", table))
    }

    fn delete(&mut self, side: Side, table: Table, keys: &[u8]) -> Result<(), Error> {
        raw_bpf::delete_batch(self.inner(side, table)?, table.entry(), keys)
            .map_err(Error::syscall("BPF_MAP_DELETE_BATCH", table))
    }

    fn counter_owners(&self) -> Result<Vec<u64>, Error> {
        self.chunks.owners()
    }

    fn set_counter_owners(&mut self, owners: &[(CounterIndex, u64)]) -> Result<(), Error> {
        self.chunks.set_owners(owners)
    }

    fn open_connections(&self) -> Result<Vec<i64>, Error> {
        self.chunks.open_connections()
    }
}

/// Runs all closures concurrently, the first in this thread; returns when all have returned.
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

/// One side's map of a table, of the same type and with the same flags as the template of the outer map, which the kernel
/// compares. A hash map is preallocated; an array may have more entries than the template (Linux 4a8f87e60f6d, 5.10).
fn table_spec(table: Table, capacity: u32) -> MapSpec {
    let (map_type, flags) = match table.is_array() {
        true => (MapType::Array, BPF_F_INNER_MAP),
        false => (MapType::Hash, 0),
    };
    MapSpec::new(map_type, table.entry(), capacity, flags)
}

/// Creates and pins an outer map, if it does not exist.
///
/// aya would create it with a template that has BTF, and then Linux 5.15 to 6.2 refuses inner maps without BTF (it compares
/// the offset of the timer, and has two values for "none"). Our template has no BTF, like the inner maps.
fn pin_outer(
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

/// Creates an outer map for inner maps like `template`.
fn array_of_maps(name: &str, template: &MapData, slots: u32) -> Result<Map, Error> {
    let fd = raw_bpf::create_array_of_maps(name, template.fd().as_fd(), slots)
        .map_err(Error::syscall("BPF_MAP_CREATE", name))?;
    MapData::from_fd(fd).and_then(Map::from_map_data).map_err(Error::map(name))
}

/// Whether a generation of this layout was ever active; an error if that cannot be determined.
pub(crate) fn is_initialized(pins: &Pins) -> Result<bool, Error> {
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

/// Opens a pinned map with entries of this size.
pub(crate) fn open(path: &Path, entry: EntrySize) -> Result<MapData, Error> {
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
    Ok(map)
}

/// Reads the active side and the number of flips from the pinned map.
pub(crate) fn read_active(pins: &Pins) -> Result<(Side, u32), Error> {
    active_words(&map_spec::open(&pins.active())?)
}

/// The active side and the number of flips in an open map.
pub(crate) fn active_words(active: &Array<MapData, u32>) -> Result<(Side, u32), Error> {
    let word = |index| active.get(index, 0).map_err(Error::map("ACTIVE"));
    let (side, flips) = (word(&SIDE)?, word(&FLIPS)?);
    Ok((Side::from_word(side).ok_or(Error::InvalidActiveSide(side))?, flips))
}
