//! The frontends of the active generation, looked up one by one: no reader needs memory for all of them.
//!
//! Invariant: what is returned at once is of one generation, whatever becomes active meanwhile.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::AsFd as _,
    path::Path,
};

use aya::maps::{Array, MapData};
use bytemuck::{AnyBitPattern, Pod, Zeroable as _};
use datapath::{ActiveFrontend, FrontendAddress, PortId, unspecified};
use model::{Family as IpFamily, Protocol};
use proxy_common::{
    counters::CounterIndex,
    net::{Be16, V4, V6},
    tables::{Family as _, Frontend, NodeAddrScope, NodePortKey, UDP},
};

use crate::{
    error::Error,
    host::raw_bpf::{self, Cursor},
    maps::{bpf_maps, map_spec, pins::Pins},
    tables::{
        store::{Side, Table},
        table_family::{TableFamily, for_family},
    },
};

/// How many entries are read at a time: more than the largest bucket of a hash map has.
const BATCH: u32 = 4096;

/// How often to read again because another generation became active meanwhile.
const MAX_ATTEMPTS: usize = 20;

pub struct ActiveFrontends {
    pins: Pins,
    active: Array<MapData, u32>,
    /// The maps of the generation that was read last, opened when they are needed.
    maps: [Option<MapData>; Table::COUNT],
    /// The number of that generation.
    generation: Option<u32>,
}

/// A frontend without its backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrontendRow {
    pub address: FrontendAddress,
    /// The service port it belongs to.
    pub port: PortId,
    /// Its number of backends.
    pub backends: u32,
}

/// A frontend in the tables.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) address: FrontendAddress,
    pub(crate) row: Frontend,
    /// In ascending order, with the counters of their connections.
    pub(crate) backends: Vec<(SocketAddr, CounterIndex)>,
}

impl From<Entry> for ActiveFrontend {
    fn from(Entry { address, row, backends }: Entry) -> Self {
        Self {
            frontend: address.to_string(),
            backends: backends.into_iter().map(|(it, _)| it).collect(),
            port: Some(PortId(row.service_port)),
        }
    }
}

impl ActiveFrontends {
    /// Opens the maps below a pin folder.
    ///
    /// # Errors
    ///
    /// If no generation was ever active, or a map has another layout or cannot be opened.
    pub fn open(pin_dir: &Path) -> Result<Self, Error> {
        Self::of(initialized(pin_dir)?)
    }

    /// Opens the maps of a version that has had an active generation.
    pub(crate) fn of(pins: Pins) -> Result<Self, Error> {
        let active = map_spec::open(&pins.active())?;
        Ok(Self { pins, active, maps: Default::default(), generation: None })
    }

    /// What `pick` takes of the frontends, in no order. Backends are not read.
    ///
    /// # Errors
    ///
    /// If the generation changes faster than it can be read; if a map is missing, has another layout or cannot be read.
    pub fn filter_map<T>(&mut self, pick: impl Fn(FrontendRow) -> Option<T>) -> Result<Vec<T>, Error> {
        let read = |maps: &mut Maps<'_>| {
            let mut found = Vec::new();
            let mut add = |_: &mut Maps<'_>, address: SocketAddr, protocol: u8, row: Frontend| {
                let protocol = if protocol == UDP { Protocol::Udp } else { Protocol::Tcp };
                let (port, backends) = (PortId(row.service_port), row.backend_count);
                let address = FrontendAddress { address, protocol };
                found.extend(pick(FrontendRow { address, port, backends }));
                Ok(())
            };
            maps.each_frontend::<V4>(&mut add)?;
            maps.each_frontend::<V6>(&mut add)?;
            maps.each_node_port(add)?;
            Ok(found)
        };
        self.read(read).map(|(_, it)| it)
    }

    /// The frontend at an address; a node port is at the unspecified one.
    ///
    /// # Errors
    ///
    /// As for [`Self::filter_map`].
    pub fn get(&mut self, address: &FrontendAddress) -> Result<Option<ActiveFrontend>, Error> {
        Ok(self.read(|maps| maps.entry(address))?.1.map(Into::into))
    }

    /// Reads from one generation, and returns its number, too.
    pub(crate) fn read<T>(
        &mut self,
        read: impl Fn(&mut Maps<'_>) -> Result<T, Error>,
    ) -> Result<(u32, T), Error> {
        let Self { pins, active, maps, generation } = self;
        let found = read_unchanged(
            || bpf_maps::active_words(active),
            |(side, number)| {
                if *generation != Some(number) {
                    (*maps, *generation) = (Default::default(), Some(number));
                }
                Ok((number, read(&mut Maps { pins, side, maps })?))
            },
        )?;
        found.ok_or_else(|| Error::ConcurrentUpdate(self.pins.dir.clone()))
    }
}

/// The maps of one side.
pub(crate) struct Maps<'a> {
    pins: &'a Pins,
    side: Side,
    maps: &'a mut [Option<MapData>; Table::COUNT],
}

impl Maps<'_> {
    /// The frontend at an address, with its backends.
    pub(crate) fn entry(&mut self, address: &FrontendAddress) -> Result<Option<Entry>, Error> {
        let (ip, port) = (address.address.ip(), Be16::new(address.address.port()));
        let protocol = address.protocol.number();
        for_family!(address.family(), F => {
            let row = if ip.is_unspecified() {
                self.get(Table::NodePorts, &NodePortKey { port, protocol, ip_version: F::VERSION })?
            } else {
                self.get(F::FRONTENDS, &F::of(ip).frontend_key(port, protocol))?
            };
            let Some(row) = row else { return Ok(None) };
            let mut backends = self.backends::<F>(&row)?;
            backends.sort_unstable();
            Ok(Some(Entry { address: *address, row, backends }))
        })
    }

    /// Which node an address belongs to, if it belongs to any.
    pub(crate) fn node_address(&mut self, ip: IpAddr) -> Result<Option<NodeAddrScope>, Error> {
        let key: V6 = for_family!(IpFamily::of(ip), F => F::of(ip).node_addr_key());
        self.get(Table::NodeAddrs, &key)
    }

    pub(crate) fn get<K: Pod, V: Pod>(&mut self, table: Table, key: &K) -> Result<Option<V>, Error> {
        let name = self.pins.inner(self.side, table);
        let map = self.map(table)?;
        raw_bpf::lookup(map.fd().as_fd(), key).map_err(Error::syscall("BPF_MAP_LOOKUP_ELEM", name.display()))
    }

    fn batch(&mut self, table: Table, count: u32, cursor: &mut Cursor) -> Result<raw_bpf::Batch, Error> {
        let name = self.pins.inner(self.side, table);
        raw_bpf::lookup_batch(self.map(table)?.fd().as_fd(), table.entry(), count, cursor)
            .map_err(Error::syscall("BPF_MAP_LOOKUP_BATCH", name.display()))
    }

    fn map(&mut self, table: Table) -> Result<&MapData, Error> {
        Ok(match &mut self.maps[table.index()] {
            Some(map) => map,
            none => none.insert(bpf_maps::open(&self.pins.inner(self.side, table), table.entry())?),
        })
    }
}

/// Reads the tables of one side.
pub(crate) trait ReadTables {
    /// All entries of a table, in no order; tables can be read meanwhile.
    fn each_batch<K: Pod, V: Pod>(
        &mut self,
        table: Table,
        each: impl FnMut(&mut Self, K, V) -> Result<(), Error>,
    ) -> Result<(), Error>;

    /// The backends of a frontend of this family.
    fn backends<F: TableFamily>(&mut self, row: &Frontend) -> Result<Vec<(SocketAddr, CounterIndex)>, Error>;

    /// The frontends of a family except node ports, with the numbers of their protocols, in no order.
    fn each_frontend<F: TableFamily>(
        &mut self,
        mut each: impl FnMut(&mut Self, SocketAddr, u8, Frontend) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.each_batch(F::FRONTENDS, |maps, key, row| {
            let (address, protocol) = F::frontend_of(key);
            each(maps, F::socket_addr(address), protocol, row)
        })
    }

    /// The node ports of both families, at the unspecified address, with the numbers of their protocols, in no order.
    fn each_node_port(
        &mut self,
        mut each: impl FnMut(&mut Self, SocketAddr, u8, Frontend) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.each_batch(Table::NodePorts, |maps, key: NodePortKey, row| {
            let family = if key.ip_version == 4 { IpFamily::V4 } else { IpFamily::V6 };
            each(maps, SocketAddr::new(unspecified(family), key.port.get()), key.protocol, row)
        })
    }

    /// All entries of a table, in no order.
    fn each<K: Pod, V: Pod>(&mut self, table: Table, mut each: impl FnMut(K, V)) -> Result<(), Error> {
        self.each_batch(table, |_, key, value| {
            each(key, value);
            Ok(())
        })
    }
}

impl ReadTables for Maps<'_> {
    fn each_batch<K: Pod, V: Pod>(
        &mut self,
        table: Table,
        mut each: impl FnMut(&mut Self, K, V) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut cursor = Cursor::default();
        loop {
            let batch = self.batch(table, BATCH, &mut cursor)?;
            rows(&(batch.keys, batch.values)).try_for_each(|(key, value)| each(self, key, value))?;
            if batch.is_last {
                return Ok(());
            }
        }
    }

    fn backends<F: TableFamily>(&mut self, row: &Frontend) -> Result<Vec<(SocketAddr, CounterIndex)>, Error> {
        let mut backends = Vec::with_capacity(row.backend_count as usize);
        // A cursor of an array is the position before the next one.
        let mut cursor = row.backend_offset.checked_sub(1).map_or_else(Cursor::default, Cursor::after);
        let mut left = row.backend_count;
        while left > 0 {
            let count = left.min(BATCH);
            let batch = self.batch(F::BACKENDS, count, &mut cursor)?;
            let entries = (batch.keys, batch.values);
            let found = rows::<u32, F::BackendEntry>(&entries)
                .filter(|(_, it)| *it != F::BackendEntry::zeroed())
                .map(|(_, it)| F::backend_of(it));
            backends.extend(found.map(|(it, counter)| (F::socket_addr(F::sock_addr(it)), counter)));
            left -= count;
            if batch.is_last {
                break;
            }
        }
        Ok(backends)
    }
}

/// Tables in memory, of which a function returns the entries.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) struct InMemory<R>(pub(crate) R);

#[cfg(any(test, feature = "fuzzing"))]
impl<R: Fn(Table) -> Entries> ReadTables for InMemory<R> {
    fn each_batch<K: Pod, V: Pod>(
        &mut self,
        table: Table,
        mut each: impl FnMut(&mut Self, K, V) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let entries = (self.0)(table);
        rows(&entries).try_for_each(|(key, value)| each(self, key, value))
    }

    fn backends<F: TableFamily>(&mut self, row: &Frontend) -> Result<Vec<(SocketAddr, CounterIndex)>, Error> {
        let mut backends = Vec::new();
        self.each(F::BACKENDS, |position: u32, it: F::BackendEntry| {
            let is_own = position.checked_sub(row.backend_offset).is_some_and(|it| it < row.backend_count);
            if is_own && it != F::BackendEntry::zeroed() {
                let (backend, counter) = F::backend_of(it);
                backends.push((F::socket_addr(F::sock_addr(backend)), counter));
            }
        })?;
        Ok(backends)
    }
}

/// The pins below a folder, if a generation was ever active there.
pub(crate) fn initialized(pin_dir: &Path) -> Result<Pins, Error> {
    let pins = Pins::new(pin_dir);
    if bpf_maps::is_initialized(&pins)? {
        Ok(pins)
    } else {
        Err(Error::NotInitialized(pin_dir.to_path_buf()))
    }
}

/// Reads what a word selects. If the word changes meanwhile, the result could be a mixture: then it is read again;
/// `None` after too many attempts.
pub(crate) fn read_unchanged<W: Copy + PartialEq, T>(
    mut word: impl FnMut() -> Result<W, Error>,
    mut read: impl FnMut(W) -> Result<T, Error>,
) -> Result<Option<T>, Error> {
    for _ in 0..MAX_ATTEMPTS {
        let before = word()?;
        let found = read(before)?;
        if word()? == before {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// The keys and the values of a table, each concatenated.
pub(crate) type Entries = (Vec<u8>, Vec<u8>);

/// The rows of a table.
pub(crate) fn rows<K: AnyBitPattern, V: AnyBitPattern>(
    (keys, values): &Entries,
) -> impl Iterator<Item = (K, V)> {
    let keys = keys.chunks_exact(size_of::<K>()).map(bytemuck::pod_read_unaligned);
    let values = values.chunks_exact(size_of::<V>()).map(bytemuck::pod_read_unaligned);
    keys.zip(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_that_keeps_changing_is_given_up() {
        let (mut flips, mut reads) = (0, 0);
        let word = || {
            flips += 1;
            Ok(flips)
        };
        let read = |_| {
            reads += 1;
            Ok(())
        };
        assert_eq!(read_unchanged(word, read).unwrap(), None);
        assert_eq!(reads, MAX_ATTEMPTS);
    }

    #[test]
    fn a_state_that_changes_while_it_is_read_is_read_again() {
        let mut words = [1, 2, 2, 3, 3, 3].into_iter();
        let word = || Ok(words.next().unwrap());
        assert_eq!(read_unchanged(word, Ok).unwrap(), Some(3), "neither 1, nor a mixture of 2 and 3");
    }
}
