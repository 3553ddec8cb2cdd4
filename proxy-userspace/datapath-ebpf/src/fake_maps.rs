//! The maps in memory, for tests: it panics when a side is written that a program could be reading, and fails by chance.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    marker::PhantomData,
    net::{IpAddr, SocketAddr},
};

use proxy_common::{
    counters::{COUNTERS_PER_CHUNK, COUNTERS_PER_PORT, CounterIndex},
    decide::Tables,
    net::{Be16, V4, V6},
    tables::{BackendEntry4, BackendEntry6, Family, Frontend, NodeAddrScope, NodePortKey, Prefilter},
};

use crate::{
    compile::FrontendAddress,
    error::Error,
    store::{Side, Store, Table},
};

type Rows = BTreeMap<Vec<u8>, Vec<u8>>;

/// The maps of one data plane.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    active: Side,
    /// Whether a program that is still running may have begun on a side.
    read: [bool; 2],
    prefilters: Box<[Prefilter; 2]>,
    tables: [[(u32, Rows); Table::COUNT]; 2],
    /// Fails one operation in so many, half done; never if 0.
    pub(super) fails_one_in: u32,
    random: u32,
    /// Whose each cell is.
    owners: Vec<u64>,
}

impl Memory {
    /// Maps as a kernel first has them: nothing in any slot.
    pub(super) fn new(seed: u32) -> Self {
        Self {
            active: Side::BOTH[0],
            read: [true; 2],
            prefilters: Box::new([Prefilter::EMPTY; 2]),
            tables: Default::default(),
            fails_one_in: 0,
            random: seed | 1,
            owners: Vec::new(),
        }
    }

    /// Whether this operation fails, and if so after how many of `n` entries.
    fn fails_after(&mut self, n: usize) -> Option<usize> {
        // xorshift32 (Marsaglia, 2003).
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        (self.fails_one_in != 0 && self.random.is_multiple_of(self.fails_one_in))
            .then_some(self.random as usize / 7 % (n + 1))
    }

    #[track_caller]
    fn writable(&mut self, side: Side, table: Table) -> &mut (u32, Rows) {
        assert!(
            side != self.active && !self.read[side.index()],
            "side {side} was written while a program could be reading it"
        );
        &mut self.tables[side.index()][table.index()]
    }

    /// Where a frontend of the active side leads: every backend a program could choose.
    pub(super) fn backends(&self, frontend: FrontendAddress) -> Option<Vec<SocketAddr>> {
        let (port, protocol) = (Be16::new(frontend.address.port()), frontend.transport.number());
        let mut backends = match frontend.address.ip() {
            IpAddr::V4(ip) => side::<V4>(self).backends(side(self).find(V4::from(ip), port, protocol)?),
            IpAddr::V6(ip) => side::<V6>(self).backends(side(self).find(V6::from(ip), port, protocol)?),
        };
        backends.sort_unstable();
        Some(backends)
    }

    /// Whether the set of a frontend of the active side lists a member.
    pub(super) fn is_member(&self, frontend: FrontendAddress, backend: SocketAddr) -> bool {
        let (port, protocol) = (Be16::new(frontend.address.port()), frontend.transport.number());
        match frontend.address.ip() {
            IpAddr::V4(ip) => {
                let found = side(self).find(V4::from(ip), port, protocol);
                found.is_some_and(|it| side::<V4>(self).has_member(it, backend))
            }
            IpAddr::V6(ip) => {
                let found = side(self).find(V6::from(ip), port, protocol);
                found.is_some_and(|it| side::<V6>(self).has_member(it, backend))
            }
        }
    }

    /// Whose an address of the active side is.
    pub(super) fn node_addr_scope(&self, address: IpAddr) -> Option<NodeAddrScope> {
        match address {
            IpAddr::V4(ip) => side::<V4>(self).node_addr_scope(ip.into()),
            IpAddr::V6(ip) => side::<V6>(self).node_addr_scope(ip.into()),
        }
    }

    /// How many entries a side has in a table.
    pub(super) fn rows(&self, side: Side, table: Table) -> u32 {
        self.tables[side.index()][table.index()].1.len() as u32
    }

    /// The cells that a program could add to which is running, or will be.
    pub(super) fn reached(&self) -> BTreeSet<CounterIndex> {
        let readable = |it: &Side| *it == self.active || self.read[it.index()];
        Side::BOTH.into_iter().filter(readable).flat_map(|side| self.cells(side)).collect()
    }

    /// The cells that the rows of a side lead to.
    pub(super) fn cells(&self, side: Side) -> BTreeSet<CounterIndex> {
        let mut cells = BTreeSet::new();
        for table in Table::ALL {
            for row in self.tables[side.index()][table.index()].1.values() {
                match table {
                    Table::Frontends4 | Table::Frontends6 | Table::NodePorts => {
                        let first = bytemuck::pod_read_unaligned::<Frontend>(row).counter;
                        cells.extend(first..first + COUNTERS_PER_PORT);
                    }
                    Table::Backends4 => {
                        cells.insert(bytemuck::pod_read_unaligned::<BackendEntry4>(row).counter);
                    }
                    Table::Backends6 => {
                        cells.insert(bytemuck::pod_read_unaligned::<BackendEntry6>(row).counter);
                    }
                    Table::Members4 | Table::Members6 => {
                        cells.insert(bytemuck::pod_read_unaligned::<CounterIndex>(row));
                    }
                    Table::NodeAddrs => {}
                }
            }
        }
        cells
    }

    /// The cells that have an owner.
    pub(super) fn owned(&self) -> BTreeSet<CounterIndex> {
        (0..).zip(&self.owners).filter(|(_, owner)| **owner != 0).map(|(cell, _)| cell).collect()
    }

    fn prefilter(&self) -> &Prefilter {
        &self.prefilters[self.active.index()]
    }

    fn get<V: bytemuck::AnyBitPattern>(&self, table: Table, key: &impl bytemuck::NoUninit) -> Option<V> {
        let (_, rows) = &self.tables[self.active.index()][table.index()];
        rows.get(bytemuck::bytes_of(key)).map(|it| bytemuck::pod_read_unaligned(it))
    }
}

/// An address family whose table entries are plain bytes.
trait TestFamily:
    Family<
        FrontendKey: bytemuck::NoUninit,
        BackendEntry: bytemuck::AnyBitPattern,
        BackendSetMemberKey: bytemuck::NoUninit,
    >
{
}

impl TestFamily for V4 {}
impl TestFamily for V6 {}

/// The active side, as a program of one address family sees it.
struct ActiveSide<'a, F>(&'a Memory, PhantomData<F>);

fn side<F: TestFamily>(maps: &Memory) -> ActiveSide<'_, F> {
    ActiveSide(maps, PhantomData)
}

impl<F: TestFamily> ActiveSide<'_, F> {
    /// The table of the family.
    fn of_family(v4: Table, v6: Table) -> Table {
        if F::VERSION == 4 { v4 } else { v6 }
    }

    /// The frontend at an address; the unspecified one stands for a node port.
    fn find(&self, address: F, port: Be16, protocol: u8) -> Option<Frontend> {
        match address == F::default() {
            true if self.may_be_node_port(port) => self.node_port(port, protocol),
            true => None,
            false if self.may_be_frontend(address) => self.frontend(address, port, protocol),
            false => None,
        }
    }

    /// The backends of a frontend.
    fn backends(&self, frontend: Frontend) -> Vec<SocketAddr> {
        let positions = frontend.backend_offset..frontend.backend_offset + frontend.backend_count;
        let entries = positions.map(|it| self.backend(it).expect("every position is there"));
        entries.map(|(backend, _)| F::sock_addr(backend).into()).collect()
    }

    /// Whether the set of a frontend has this member.
    fn has_member(&self, frontend: Frontend, backend: SocketAddr) -> bool {
        self.member(frontend.set, F::backend_at(backend.into())).is_some()
    }
}

impl<F: TestFamily> Tables for ActiveSide<'_, F> {
    type Ip = F;

    fn prefilter(&self) -> Option<&Prefilter> {
        Some(self.0.prefilter())
    }

    fn frontend(&self, ip: F, port: Be16, protocol: u8) -> Option<Frontend> {
        let table = Self::of_family(Table::Frontends4, Table::Frontends6);
        self.0.get(table, &ip.frontend_key(port, protocol))
    }

    fn node_port(&self, port: Be16, protocol: u8) -> Option<Frontend> {
        self.0.get(Table::NodePorts, &NodePortKey { port, protocol, ip_version: F::VERSION })
    }

    fn node_addr_scope(&self, ip: F) -> Option<NodeAddrScope> {
        self.0.get(Table::NodeAddrs, &ip.node_addr_key())
    }

    fn backend(&self, position: u32) -> Option<(F::Backend, CounterIndex)> {
        let table = Self::of_family(Table::Backends4, Table::Backends6);
        self.0.get(table, &position).map(F::backend_of)
    }

    fn member(&self, set: u32, backend: F::Backend) -> Option<CounterIndex> {
        let table = Self::of_family(Table::Members4, Table::Members6);
        self.0.get(table, &F::member_key(set, backend))
    }
}

fn refused(call: &'static str, table: Table, errno: i32) -> Error {
    Error::Syscall { call, what: table.to_string(), source: io::Error::from_raw_os_error(errno) }
}

impl Store for Memory {
    fn active(&self) -> Result<Side, Error> {
        Ok(self.active)
    }

    fn activate(&mut self, side: Side) -> Result<(), Error> {
        if self.fails_after(0).is_some() {
            return Err(Error::SideWord(7));
        }
        self.read[self.active.index()] = true;
        self.active = side;
        Ok(())
    }

    fn grace(&mut self) -> Result<(), Error> {
        if self.fails_after(0).is_some() {
            return Err(refused("grace", Table::Frontends4, libc::ENOMEM));
        }
        self.read[self.active.other().index()] = false;
        Ok(())
    }

    fn replace(&mut self, side: Side, maps: &[(Table, u32)]) -> Result<(), Error> {
        for (table, capacity) in maps {
            if self.fails_after(0).is_some() {
                return Err(refused("replace", *table, libc::ENOMEM));
            }
            *self.writable(side, *table) = (*capacity, Rows::new());
        }
        Ok(())
    }

    fn set_prefilter(&mut self, side: Side, prefilter: &Prefilter) -> Result<(), Error> {
        if self.fails_after(0).is_some() {
            return Err(refused("set_prefilter", Table::NodePorts, libc::ENOMEM));
        }
        self.writable(side, Table::NodePorts);
        self.prefilters[side.index()] = *prefilter;
        Ok(())
    }

    fn put(&mut self, side: Side, table: Table, keys: &[u8], values: &[u8]) -> Result<(), Error> {
        let n = keys.len() / table.key_size();
        assert_eq!(n * table.key_size(), keys.len());
        assert_eq!(n * table.value_size(), values.len());
        let fails_after = self.fails_after(n);
        let (capacity, rows) = self.writable(side, table);
        let entries = keys.chunks(table.key_size()).zip(values.chunks(table.value_size()));
        for (done, (key, value)) in entries.enumerate() {
            if fails_after == Some(done) {
                return Err(refused("put", table, libc::EBUSY));
            }
            let is_full = if table.is_array() {
                bytemuck::pod_read_unaligned::<u32>(key) >= *capacity
            } else {
                rows.len() == *capacity as usize && !rows.contains_key(key)
            };
            if is_full {
                return Err(refused("put", table, libc::E2BIG));
            }
            if table.is_array() && value.iter().all(|it| *it == 0) {
                rows.remove(key);
            } else {
                rows.insert(key.to_vec(), value.to_vec());
            }
        }
        if fails_after.is_some() { Err(refused("put", table, libc::EBUSY)) } else { Ok(()) }
    }

    fn delete(&mut self, side: Side, table: Table, keys: &[u8]) -> Result<(), Error> {
        let fails_after = self.fails_after(keys.len() / table.key_size());
        let (_, rows) = self.writable(side, table);
        assert!(!table.is_array(), "nothing can be deleted from {table}");
        for (done, key) in keys.chunks(table.key_size()).enumerate() {
            if fails_after == Some(done) {
                return Err(refused("delete", table, libc::EBUSY));
            }
            assert!(rows.remove(key).is_some(), "an entry of {table} was deleted that is not there");
        }
        Ok(())
    }

    fn owners(&self) -> Result<Vec<u64>, Error> {
        Ok(self.owners.clone())
    }

    fn own(&mut self, cells: &[(CounterIndex, u64)]) -> Result<(), Error> {
        let fails_after = self.fails_after(cells.len());
        let reached = self.reached();
        for (done, (cell, owner)) in cells.iter().enumerate() {
            if fails_after == Some(done) {
                return Err(refused("own", Table::Frontends4, libc::ENOMEM));
            }
            assert!(!reached.contains(cell), "cell {cell} changed hands while a program could add to it");
            let place = *cell as usize;
            self.owners.resize(self.owners.len().max(place + 1).next_multiple_of(COUNTERS_PER_CHUNK), 0);
            self.owners[place] = *owner;
        }
        if fails_after.is_some() { Err(refused("own", Table::Frontends4, libc::EBUSY)) } else { Ok(()) }
    }
}
