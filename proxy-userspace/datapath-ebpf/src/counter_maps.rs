//! The chunks of counters in the kernel: made as they are needed, never replaced, and removed from the end when nobody
//! counts there any more.
//!
//! The one rule: the rows in which programs count are only read here. What a counter had counted before it got its owner
//! is kept as its base, so that nothing ever has to be set back.

use std::os::fd::{AsFd as _, AsRawFd as _, RawFd};

use aya::{
    maps::{Array, ArrayOfMaps, Map, MapData, MapType},
    util::nr_cpus,
};
use aya_obj::generated::bpf_map_type;
use proxy_common::counters::{
    COUNTERS_PER_CHUNK, CounterIndex, CounterStripe, MAX_CHUNKS, MAX_STRIPES, METADATA_ROWS, chunk_of,
    index_in_chunk,
};

use crate::{
    error::Error,
    map_spec::{self, Pinned, Shape},
    pins::{self, Pins},
    raw_bpf,
};

/// What the kernel says of a command that this kind of map does not have; its own, not errno's.
const ENOTSUPP: i32 = 524;

/// One chunk.
type Chunk = Array<MapData, CounterStripe>;

/// Every chunk there is.
pub(super) struct Chunks {
    pins: Pins,
    stripes: u32,
    chunks: Vec<Chunk>,
}

/// How many stripes a chunk has: as many as those that are there, or else by the number of CPUs.
pub(super) fn stripes(pins: &Pins) -> Result<u32, Error> {
    match map_spec::find(&pins.chunk(0))? {
        // A foreign map is found out when its shape is checked.
        Some(map) => {
            Ok(map.info().map_err(Error::map("chunk0"))?.max_entries().saturating_sub(METADATA_ROWS))
        }
        None => {
            let cpus = nr_cpus().map_err(|(path, error)| Error::syscall("read", path)(error))?;
            Ok((cpus as u32).next_power_of_two().min(MAX_STRIPES))
        }
    }
}

/// The outer map and the chunks that are pinned, as they have to be.
pub(super) fn pinned(pins: &Pins, stripes: u32) -> Vec<Pinned> {
    let word = size_of::<CounterIndex>() as u32;
    let outer = Shape {
        map_type: MapType::ArrayOfMaps,
        key_size: word,
        value_size: word,
        max_entries: MAX_CHUNKS,
        flags: 0,
    };
    let of_chunk = || Shape {
        map_type: MapType::Array,
        key_size: word,
        value_size: size_of::<CounterStripe>() as u32,
        max_entries: stripes + METADATA_ROWS,
        flags: 0,
    };
    let numbers = (0..MAX_CHUNKS).take_while(|it| pins.chunk(*it).exists());
    let chunks = numbers.map(|it| Pinned { name: CHUNK, path: pins.chunk(it), shape: of_chunk() });
    std::iter::once(Pinned { name: OUTER, path: pins.chunks(), shape: outer }).chain(chunks).collect()
}

/// The name of the outer map in the kernel object.
pub(super) const OUTER: &str = "COUNTERS";

/// What chunks are called, which the kernel object does not know.
pub(super) const CHUNK: &str = "chunk";

/// An empty chunk.
pub(super) fn create(stripes: u32) -> Result<MapData, Error> {
    let array = bpf_map_type::BPF_MAP_TYPE_ARRAY as u32;
    let (key, value) = (size_of::<CounterIndex>() as u32, size_of::<CounterStripe>() as u32);
    let map = aya_obj::Map::new_from_params(array, key, value, stripes + METADATA_ROWS, 0);
    MapData::create(map, "counters", None).map_err(Error::map("counters"))
}

impl Chunks {
    /// The chunks that are pinned, whose shapes were checked.
    pub(super) fn open(pins: &Pins, stripes: u32) -> Result<Self, Error> {
        let mut chunks = Vec::new();
        while let Some(map) = map_spec::find(&pins.chunk(chunks.len() as u32))? {
            chunks.push(array(map)?);
        }
        Ok(Self { pins: pins.clone(), stripes, chunks })
    }

    /// The owner of each cell, in order; 0 for nobody.
    pub(super) fn owners(&self) -> Result<Vec<u64>, Error> {
        let mut owners = Vec::with_capacity(self.chunks.len() * COUNTERS_PER_CHUNK);
        for it in &self.chunks {
            owners.extend_from_slice(read(it, self.stripes)?.as_slice());
        }
        Ok(owners)
    }

    /// What each cell has counted since it got its owner, in order.
    pub(super) fn counts(&self) -> Result<Vec<u64>, Error> {
        let mut counts = Vec::with_capacity(self.chunks.len() * COUNTERS_PER_CHUNK);
        for it in &self.chunks {
            let bases = read(it, self.stripes + 1)?;
            counts.extend(self.sums(it)?.iter().zip(bases.iter()).map(|(sum, base)| sum.wrapping_sub(*base)));
        }
        Ok(counts)
    }

    /// Gives cells, which are in order, to owners, or to nobody. Programs find chunks in `outer`.
    pub(super) fn own(
        &mut self,
        cells: &[(CounterIndex, u64)],
        outer: &mut ArrayOfMaps<MapData, MapData>,
    ) -> Result<(), Error> {
        if let Some((last, _)) = cells.last() {
            self.grow(chunk_of(*last) as usize + 1, outer)?;
        }
        for cells in cells.chunk_by(|(a, _), (b, _)| chunk_of(*a) == chunk_of(*b)) {
            let number = chunk_of(cells[0].0);
            let map = &self.chunks[number as usize];
            let sums = self.sums(map)?;
            let (mut owners, mut bases) = (read(map, self.stripes)?, read(map, self.stripes + 1)?);
            for (cell, owner) in cells {
                let place = index_in_chunk(*cell);
                owners[place] = *owner;
                bases[place] = sums[place];
            }
            // The base comes first: without an owner it means nothing.
            write(&mut self.chunks[number as usize], self.stripes + 1, &bases)?;
            write(&mut self.chunks[number as usize], self.stripes, &owners)?;
        }
        // The first one stays: it says how many stripes there are.
        while let [_, .., last] = &self.chunks[..]
            && read(last, self.stripes)?.iter().all(|owner| *owner == 0)
        {
            let number = self.chunks.len() as u32 - 1;
            pins::remove_pin(&self.pins.chunk(number))?;
            // aya gives no access to the outer map but by its pin.
            let outer =
                raw_bpf::obj_get(&self.pins.chunks()).map_err(Error::syscall("BPF_OBJ_GET", OUTER))?;
            raw_bpf::delete(outer.as_fd(), number).map_err(Error::syscall("BPF_MAP_DELETE_ELEM", OUTER))?;
            self.chunks.pop();
        }
        Ok(())
    }

    /// Makes chunks until there are so many.
    fn grow(&mut self, count: usize, outer: &mut ArrayOfMaps<MapData, MapData>) -> Result<(), Error> {
        let numbers: Vec<_> = (self.chunks.len()..count).map(|it| it as u32).collect();
        let made = numbers.iter().map(|_| create(self.stripes)).collect::<Result<Vec<_>, _>>()?;
        // Whoever finds a pin finds the chunk in the outer map, too.
        self.show(&numbers, &made, outer)?;
        for (number, map) in numbers.into_iter().zip(made) {
            pins::replace(&self.pins.chunk(number), |path| map.pin(path).map_err(Error::pin(path)))?;
            self.chunks.push(array(map)?);
        }
        Ok(())
    }

    /// Has programs find new chunks, all by one call: the kernel waits for a grace period after each.
    fn show(
        &self,
        numbers: &[u32],
        maps: &[MapData],
        outer: &mut ArrayOfMaps<MapData, MapData>,
    ) -> Result<(), Error> {
        if let ([number], [map]) = (numbers, maps) {
            return outer.set(*number, map, 0).map_err(Error::map(OUTER));
        }
        if numbers.is_empty() {
            return Ok(());
        }
        // aya gives no access to the outer map but by its pin.
        let fd = raw_bpf::obj_get(&self.pins.chunks()).map_err(Error::syscall("BPF_OBJ_GET", OUTER))?;
        let fds: Vec<_> = maps.iter().map(|it| it.fd().as_fd().as_raw_fd()).collect();
        let entry = raw_bpf::Entry { key: size_of::<u32>(), value: size_of::<RawFd>() };
        match raw_bpf::update_batch(
            fd.as_fd(),
            entry,
            bytemuck::cast_slice(numbers),
            bytemuck::cast_slice(&fds),
        ) {
            // Older kernels take batches of other maps only.
            Err(error) if error.raw_os_error() == Some(ENOTSUPP) => {
                for (number, map) in numbers.iter().zip(maps) {
                    outer.set(*number, map, 0).map_err(Error::map(OUTER))?;
                }
                Ok(())
            }
            result => result.map_err(Error::syscall("BPF_MAP_UPDATE_BATCH", OUTER)),
        }
    }

    /// What the stripes of a chunk come to.
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

fn array(map: MapData) -> Result<Chunk, Error> {
    Map::from_map_data(map).and_then(Array::try_from).map_err(Error::map("counters"))
}

fn read(chunk: &Chunk, row: u32) -> Result<Box<CounterStripe>, Error> {
    chunk.get(&row, 0).map(Box::new).map_err(Error::map("counters"))
}

fn write(chunk: &mut Chunk, row: u32, cells: &CounterStripe) -> Result<(), Error> {
    chunk.set(row, *cells, 0).map_err(Error::map("counters"))
}
