//! The chunks of counters in the kernel: created as needed, never replaced, and removed from the end when no counter of
//! theirs has an owner. Any process can read them by the names of service ports, whether or not an instance runs.
//!
//! Invariant: the rows in which programs count are only read here. The value of a counter when it got its owner is stored as
//! its base, so that no counter is ever reset; and what corrects the number of open connections lies beside it.

use std::{
    net::SocketAddr,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd},
    path::Path,
};

use aya::{
    maps::{Array, Map, MapData, MapType},
    util::nr_cpus,
};
use aya_obj::generated::BPF_ANY;
use datapath::{ForwardCounts, PacketCount, PortCounts, PortId};
use model::{Protocol, ServiceName};
use proxy_common::counters::{
    AGE_ROW, BASE_ROW, BackendAge, CONNECTIONS, COUNTERS_PER_CHUNK, COUNTERS_PER_PORT, CounterIndex,
    CounterStripe, DENIED, DROPPED, LEFT_TO_PACKETS, MAX_CHUNKS, MAX_STRIPES, METADATA_ROWS, NO_BACKEND,
    OPEN_ROW, RECEIVED, SECOND_CHANCES, SENT, SERVED, chunk_of, index_in_chunk,
};

use crate::{
    error::Error,
    host::{
        clock,
        raw_bpf::{self, EntrySize},
    },
    maps::{
        map_spec::{self, MapSpec, PinnedMap},
        pins::{self, Pins},
    },
    tables::{
        compile::{is_translated, port_id},
        counter_alloc::{CounterOwner, ForwardPart},
    },
};

/// The kernel's own errno for a command that this map type lacks; libc does not have it.
const ENOTSUPP: i32 = 524;

/// The name of the outer map in the kernel object.
pub(crate) const OUTER: &str = "COUNTERS";

/// The name of chunks, which are not maps of the kernel object.
pub(crate) const CHUNK: &str = "chunk";

type Chunk = Array<MapData, CounterStripe>;

pub(crate) struct CounterChunks {
    pins: Pins,
    stripes: u32,
    chunks: Vec<Chunk>,
}

/// How many stripes a chunk has: those of the pinned ones, otherwise by the number of CPUs.
pub(crate) fn stripes(pins: &Pins) -> Result<u32, Error> {
    match map_spec::find(&pins.chunk(0))? {
        // A foreign map is rejected when its specification is checked.
        Some(map) => {
            Ok(map.info().map_err(Error::map("chunk0"))?.max_entries().saturating_sub(METADATA_ROWS))
        }
        None => {
            let cpus = nr_cpus().map_err(|(path, error)| Error::syscall("read", path)(error))?;
            Ok((cpus as u32).next_power_of_two().min(MAX_STRIPES))
        }
    }
}

/// The outer map and the pinned chunks, with their specifications.
pub(crate) fn pinned_maps(pins: &Pins, stripes: u32) -> Vec<PinnedMap> {
    let outer = MapSpec::new(MapType::ArrayOfMaps, EntrySize::of::<u32, u32>(), MAX_CHUNKS, 0);
    let chunks = (0..MAX_CHUNKS).map(|it| pins.chunk(it)).take_while(|it| it.exists());
    let chunks = chunks.map(|path| PinnedMap { name: CHUNK, path, spec: chunk_spec(stripes) });
    std::iter::once(PinnedMap { name: OUTER, path: pins.chunks(), spec: outer }).chain(chunks).collect()
}

fn chunk_spec(stripes: u32) -> MapSpec {
    MapSpec::new(MapType::Array, EntrySize::of::<u32, CounterStripe>(), stripes + METADATA_ROWS, 0)
}

pub(crate) fn create(stripes: u32) -> Result<MapData, Error> {
    chunk_spec(stripes).create("counters")
}

impl CounterChunks {
    /// Opens the pinned chunks, whose specifications were checked.
    pub(crate) fn open(pins: &Pins, stripes: u32) -> Result<Self, Error> {
        let mut chunks = Vec::new();
        while let Some(map) = map_spec::find(&pins.chunk(chunks.len() as u32))? {
            chunks.push(array(map)?);
        }
        Ok(Self { pins: pins.clone(), stripes, chunks })
    }

    /// The owner of each counter, in order; 0 for none.
    pub(crate) fn owners(&self) -> Result<Vec<u64>, Error> {
        let mut owners = Vec::with_capacity(self.chunks.len() * COUNTERS_PER_CHUNK);
        for it in &self.chunks {
            owners.extend_from_slice(read(it, self.stripes)?.as_slice());
        }
        Ok(owners)
    }

    /// The value of each counter of a chunk since it got its owner.
    fn values(&self, chunk: &Chunk) -> Result<Box<CounterStripe>, Error> {
        let mut values = self.sums(chunk)?;
        for (value, base) in values.iter_mut().zip(read(chunk, self.stripes + BASE_ROW)?.iter()) {
            *value = value.wrapping_sub(*base);
        }
        Ok(values)
    }

    /// Assigns counters, in ascending order, to owners, or to none.
    pub(crate) fn set_owners(&mut self, owners: &[(CounterIndex, u64)]) -> Result<(), Error> {
        if let Some((last, _)) = owners.last() {
            self.grow(chunk_of(*last) + 1)?;
        }
        let began = clock::now()?.as_secs() as u32;
        for updates in owners.chunk_by(|(a, _), (b, _)| chunk_of(*a) == chunk_of(*b)) {
            let number = chunk_of(updates[0].0) as usize;
            let chunk = &self.chunks[number];
            let sums = self.sums(chunk)?;
            let read = |row| read(chunk, self.stripes + row);
            let (mut owners, mut bases, open, mut ages) =
                (read(0)?, read(BASE_ROW)?, read(OPEN_ROW)?, read(AGE_ROW)?);
            for (counter, owner) in updates {
                let index = index_in_chunk(*counter);
                let mut age = BackendAge::from_bits(ages[index]);
                age.began = began;
                if owners[index] != *owner {
                    owners[index] = *owner;
                    bases[index] = sums[index];
                    age.correction = (open[index] as i32).wrapping_neg();
                }
                ages[index] = age.bits();
            }
            // The owner comes last: without one the others mean nothing.
            for (row, values) in [(AGE_ROW, ages), (BASE_ROW, bases), (0, owners)] {
                write(&mut self.chunks[number], self.stripes + row, &values)?;
            }
        }
        // The first chunk stays: it says how many stripes there are.
        while let [_, .., last] = &self.chunks[..]
            && read(last, self.stripes)?.iter().all(|owner| *owner == 0)
        {
            let number = self.chunks.len() as u32 - 1;
            pins::remove_pin(&self.pins.chunk(number))?;
            raw_bpf::delete(self.outer()?.as_fd(), number)
                .map_err(Error::syscall("BPF_MAP_DELETE_ELEM", OUTER))?;
            self.chunks.pop();
        }
        Ok(())
    }

    /// Creates chunks until there are `count`.
    fn grow(&mut self, count: u32) -> Result<(), Error> {
        let numbers: Vec<_> = (self.chunks.len() as u32..count).collect();
        if numbers.is_empty() {
            return Ok(());
        }
        let created = numbers.iter().map(|_| create(self.stripes)).collect::<Result<Vec<_>, _>>()?;
        // A chunk that is pinned is in the outer map, too.
        self.publish(&numbers, &created)?;
        for (number, map) in numbers.into_iter().zip(created) {
            pins::replace(&self.pins.chunk(number), |path| map.pin(path).map_err(Error::pin(path)))?;
            self.chunks.push(array(map)?);
        }
        Ok(())
    }

    /// Puts new chunks into the outer map, all by one call: the kernel waits for a grace period after each call.
    fn publish(&self, numbers: &[u32], maps: &[MapData]) -> Result<(), Error> {
        let outer = self.outer()?;
        let fds: Vec<_> = maps.iter().map(|it| it.fd().as_fd().as_raw_fd()).collect();
        if numbers.len() > 1 {
            let (keys, values) = (bytemuck::cast_slice(numbers), bytemuck::cast_slice(&fds));
            match raw_bpf::update_batch(outer.as_fd(), EntrySize::of::<u32, RawFd>(), keys, values) {
                // Older kernels have no batch updates of outer maps.
                Err(error) if error.raw_os_error() == Some(ENOTSUPP) => {}
                result => return result.map_err(Error::syscall("BPF_MAP_UPDATE_BATCH", OUTER)),
            }
        }
        for (number, fd) in numbers.iter().zip(&fds) {
            raw_bpf::update(outer.as_fd(), number, fd, BPF_ANY)
                .map_err(Error::syscall("BPF_MAP_UPDATE_ELEM", OUTER))?;
        }
        Ok(())
    }

    /// The outer map, in which programs find chunks.
    fn outer(&self) -> Result<OwnedFd, Error> {
        raw_bpf::obj_get(&self.pins.chunks()).map_err(Error::syscall("BPF_OBJ_GET", OUTER))
    }

    /// The open connections of each counter's backend, in order, as they were counted.
    pub(crate) fn open_connections(&self) -> Result<Vec<i64>, Error> {
        let mut all = Vec::with_capacity(self.chunks.len() * COUNTERS_PER_CHUNK);
        for it in &self.chunks {
            let (open, ages) = (read(it, self.stripes + OPEN_ROW)?, read(it, self.stripes + AGE_ROW)?);
            all.extend(
                open.iter().zip(ages.iter()).map(|(open, age)| BackendAge::from_bits(*age).counted(*open)),
            );
        }
        Ok(all)
    }

    /// Adds to the numbers of open connections.
    pub(crate) fn correct_open_connections(
        &mut self,
        corrections: &[(CounterIndex, i64)],
    ) -> Result<(), Error> {
        for &(counter, difference) in corrections {
            if let Some(chunk) = self.chunks.get_mut(chunk_of(counter) as usize) {
                let mut ages = read(chunk, self.stripes + AGE_ROW)?;
                let bits = &mut ages[index_in_chunk(counter)];
                let mut age = BackendAge::from_bits(*bits);
                age.correction = age.correction.wrapping_add(difference as i32);
                *bits = age.bits();
                write(chunk, self.stripes + AGE_ROW, &ages)?;
            }
        }
        Ok(())
    }

    /// The sum of the stripes of each counter of a chunk.
    fn sums(&self, chunk: &Chunk) -> Result<Box<CounterStripe>, Error> {
        let mut sums = read(chunk, 0)?;
        for stripe in 1..self.stripes {
            for (sum, it) in sums.iter_mut().zip(read(chunk, stripe)?.iter()) {
                *sum = sum.wrapping_add(*it);
            }
        }
        Ok(sums)
    }
}

/// The counters of service ports and their backends at one moment: of the backends only those that have any connection.
#[derive(Debug, Default)]
pub struct Counts {
    /// Of each block the first counter and the values, in the order of their owners.
    blocks: Vec<(CounterOwner, CounterIndex, Block)>,
    /// In the order of their owners.
    backends: Vec<(CounterOwner, u64)>,
}

/// The values of the counters of a service port, or of a part of its packets that are forwarded.
type Block = [u64; COUNTERS_PER_PORT as usize];

/// Reads all counters; there are none if no instance ever ran.
///
/// # Errors
///
/// If a map has another layout or cannot be read.
pub fn counts(pin_dir: &Path) -> Result<Counts, Error> {
    let pins = Pins::new(pin_dir);
    let stripes = stripes(&pins)?;
    for it in pinned_maps(&pins, stripes) {
        it.check()?;
    }
    let chunks = CounterChunks::open(&pins, stripes)?;
    let mut counts = Counts::default();
    for (chunk, first) in chunks.chunks.iter().zip((0..).step_by(COUNTERS_PER_CHUNK)) {
        counts.add(first, read(chunk, stripes)?.as_slice(), chunks.values(chunk)?.as_slice());
    }
    counts.blocks.sort_by_key(|(owner, ..)| *owner);
    counts.backends.sort_by_key(|(owner, _)| *owner);
    Ok(counts)
}

impl Counts {
    /// Adds the counters of a chunk from the `first` one on.
    fn add(&mut self, first: CounterIndex, owners: &[u64], values: &[u64]) {
        let size = COUNTERS_PER_PORT as usize;
        let blocks = owners.chunks(size).zip(values.chunks(size));
        for ((owners, values), first) in blocks.zip((first..).step_by(size)) {
            // A block of one owner is that of a service port, as in the allocator.
            if owners[0] != 0
                && owners.iter().all(|it| *it == owners[0])
                && let Ok(values) = values.try_into()
            {
                self.blocks.push((CounterOwner(owners[0]), first, values));
                continue;
            }
            let used = owners.iter().zip(values).filter(|(owner, value)| **owner != 0 && **value != 0);
            self.backends.extend(used.map(|(owner, value)| (CounterOwner(*owner), *value)));
        }
    }

    /// The counters of a service port; `None` for a protocol that is not translated.
    pub fn port(&self, service: &ServiceName, port: &str, protocol: Protocol) -> Option<PortCounts> {
        is_translated(protocol).then(|| self.of(PortId(port_id(service, port, protocol))))
    }

    /// The first counter of a service port, if it has any.
    pub fn first_counter(
        &self,
        service: &ServiceName,
        port: &str,
        protocol: Protocol,
    ) -> Option<CounterIndex> {
        self.find(CounterOwner::port(port_id(service, port, protocol))).map(|(_, first, _)| *first)
    }

    /// How many connections of a service port, by its names, were redirected to one of its backends.
    pub fn endpoint(
        &self,
        service: &ServiceName,
        port: &str,
        protocol: Protocol,
        backend: SocketAddr,
    ) -> u64 {
        self.to(PortId(port_id(service, port, protocol)), backend)
    }

    /// The counters of a service port; zero if it has none.
    pub fn of(&self, port: PortId) -> PortCounts {
        let block = |owner| self.find(owner).map(|(_, _, values)| *values).unwrap_or_default();
        let port_values = block(CounterOwner::port(port.0));
        let value = |offset: CounterIndex| port_values[offset as usize];
        PortCounts {
            connections: value(CONNECTIONS),
            no_backend: value(NO_BACKEND),
            denied: value(DENIED),
            left_to_packets: value(LEFT_TO_PACKETS),
            external_connections: 0,
            forwarding: forward_counts(|part| block(CounterOwner::forwarded(port.0, part))),
        }
    }

    /// How many connections of a service port were redirected to one of its backends.
    pub fn to(&self, port: PortId, backend: SocketAddr) -> u64 {
        let owner = CounterOwner::backend(port.0, backend);
        let found = self.backends.binary_search_by_key(&owner, |(owner, _)| *owner);
        found.map_or(0, |it| self.backends[it].1)
    }

    fn find(&self, owner: CounterOwner) -> Option<&(CounterOwner, CounterIndex, Block)> {
        self.blocks.binary_search_by_key(&owner, |(owner, ..)| *owner).ok().map(|it| &self.blocks[it])
    }
}

fn forward_counts(of: impl Fn(ForwardPart) -> Block) -> ForwardCounts {
    let (arrived, forwarded) = (of(ForwardPart::Arrived), of(ForwardPart::Forwarded));
    let count = |values: Block, first: CounterIndex| {
        let first = first as usize;
        PacketCount { packets: values[first], bytes: values[first + 1] }
    };
    ForwardCounts {
        sent: count(arrived, SENT),
        served: count(arrived, SERVED),
        received: count(forwarded, RECEIVED),
        second_chances: forwarded[SECOND_CHANCES as usize],
        dropped: forwarded[DROPPED as usize],
    }
}

fn array(map: MapData) -> Result<Chunk, Error> {
    Map::from_map_data(map).and_then(Array::try_from).map_err(Error::map("counters"))
}

fn read(chunk: &Chunk, row: u32) -> Result<Box<CounterStripe>, Error> {
    chunk.get(&row, 0).map(Box::new).map_err(Error::map("counters"))
}

fn write(chunk: &mut Chunk, row: u32, values: &CounterStripe) -> Result<(), Error> {
    chunk.set(row, *values, 0).map_err(Error::map("counters"))
}
