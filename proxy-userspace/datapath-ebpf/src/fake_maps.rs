//! The maps in memory, for tests: they panic if a side is written that a program could be reading, and fail randomly.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
};

use datapath::FrontendAddress;
use model::{Family, Protocol};
use proxy_common::{
    counters::{COUNTERS_PER_CHUNK, COUNTERS_PER_PORT, CounterIndex},
    net::Be16,
    tables::{
        BackendEntry4, BackendEntry6, Family as _, Frontend, HealthPolicy, NodeAddrScope, NodePortKey,
        Prefilter, TCP, UDP,
    },
};

use crate::{
    error::Error,
    observe::active_frontends::Entries,
    tables::{
        store::{MapStore, Side, Table},
        table_family::{TableFamily, for_family},
    },
};

type Rows = BTreeMap<Vec<u8>, Vec<u8>>;

#[derive(Clone, Debug)]
pub(super) struct FakeMaps {
    active: Side,
    /// Whether a running program may be reading a side.
    is_read: [bool; 2],
    prefilters: Box<[Prefilter; 2]>,
    tables: [[(u32, Rows); Table::COUNT]; 2],
    /// One operation in so many fails after a part of it; 0 for none.
    pub(super) fails_one_in: u32,
    random: fastrand::Rng,
    /// The owner of each counter.
    owners: Vec<u64>,
}

impl FakeMaps {
    /// Empty maps, as the kernel creates them.
    pub(super) fn new(seed: u32) -> Self {
        Self {
            active: Side::BOTH[0],
            is_read: [true; 2],
            prefilters: Box::new([Prefilter::EMPTY; 2]),
            tables: Default::default(),
            fails_one_in: 0,
            random: fastrand::Rng::with_seed(seed.into()),
            owners: Vec::new(),
        }
    }

    /// How many of `n` entries this operation writes, and its result after those.
    fn outcome(&mut self, call: &'static str, table: Table, n: usize) -> (usize, Result<(), Error>) {
        if self.fails_one_in != 0 && self.random.u32(..self.fails_one_in) == 0 {
            (self.random.usize(..=n), Err(refused(call, table, libc::EBUSY)))
        } else {
            (n, Ok(()))
        }
    }

    #[track_caller]
    fn writable(&mut self, side: Side, table: Table) -> &mut (u32, Rows) {
        assert!(
            side != self.active && !self.is_read[side.index()],
            "side {side} was written while a program could be reading it"
        );
        &mut self.tables[side.index()][table.index()]
    }

    /// The row that programs find for a frontend of the active side, and the backends they choose from.
    fn find<F: TableFamily>(&self, frontend: FrontendAddress) -> Option<(Frontend, Vec<SocketAddr>)> {
        let prefilter = &self.prefilters[self.active.index()];
        let ip = F::of(frontend.address.ip());
        let port = Be16::new(frontend.address.port());
        let protocol = if frontend.protocol == Protocol::Tcp { TCP } else { UDP };
        let row: Frontend = match frontend.address.ip().is_unspecified() {
            true if prefilter.node_ports.contains(port) => {
                self.get(Table::NodePorts, &NodePortKey { port, protocol, ip_version: F::VERSION })?
            }
            false if ip.may_be_frontend(prefilter) => {
                self.get(F::FRONTENDS, &ip.frontend_key(port, protocol))?
            }
            _ => return None,
        };
        let positions = row.backend_offset..row.backend_offset + row.backend_count;
        let backends =
            positions.map(|it| self.get(F::BACKENDS, &it).expect("every position is in the array"));
        let mut backends: Vec<_> =
            backends.map(|it| F::socket_addr(F::sock_addr(F::backend_of(it).0))).collect();
        backends.sort_unstable();
        Some((row, backends))
    }

    /// The backends of a frontend of the active side: all that a program could choose.
    pub(super) fn backends(&self, frontend: FrontendAddress) -> Option<Vec<SocketAddr>> {
        for_family!(frontend.family(), F => Some(self.find::<F>(frontend)?.1))
    }

    /// When backends of a frontend of the active side are ejected.
    pub(super) fn health(&self, frontend: FrontendAddress) -> Option<HealthPolicy> {
        for_family!(frontend.family(), F => Some(self.find::<F>(frontend)?.0.health))
    }

    /// Whether the set of a frontend of the active side has a member.
    pub(super) fn is_member(&self, frontend: FrontendAddress, backend: SocketAddr) -> bool {
        for_family!(frontend.family(), F => self.find::<F>(frontend).is_some_and(|(row, _)| {
            let key = F::member_key(row.set, F::backend_at(backend.into()));
            self.get::<CounterIndex>(F::MEMBERS, &key).is_some()
        }))
    }

    pub(super) fn node_addr_scope(&self, address: IpAddr) -> Option<NodeAddrScope> {
        for_family!(Family::of(address), F => self.get(Table::NodeAddrs, &F::of(address).node_addr_key()))
    }

    /// The keys and values of a table of the active side, as they are read from the kernel.
    pub(super) fn entries(&self, table: Table) -> Entries {
        let (_, rows) = &self.tables[self.active.index()][table.index()];
        (rows.keys().flatten().copied().collect(), rows.values().flatten().copied().collect())
    }

    pub(super) fn rows(&self, side: Side, table: Table) -> u32 {
        self.tables[side.index()][table.index()].1.len() as u32
    }

    /// How many entries the map of a side has room for.
    pub(super) fn capacity(&self, side: Side, table: Table) -> u32 {
        self.tables[side.index()][table.index()].0
    }

    /// The counters that a running or future program can increment.
    fn reachable_counters(&self) -> BTreeSet<CounterIndex> {
        let readable = |it: &Side| *it == self.active || self.is_read[it.index()];
        Side::BOTH.into_iter().filter(readable).flat_map(|side| self.counters(side)).collect()
    }

    /// The counters that the entries of a side refer to.
    pub(super) fn counters(&self, side: Side) -> BTreeSet<CounterIndex> {
        let mut counters = BTreeSet::new();
        for table in Table::ALL {
            for row in self.tables[side.index()][table.index()].1.values() {
                match table {
                    Table::Frontends4 | Table::Frontends6 | Table::NodePorts => {
                        let first = bytemuck::pod_read_unaligned::<Frontend>(row).counter;
                        counters.extend(first..first + COUNTERS_PER_PORT);
                    }
                    Table::Backends4 => {
                        counters.insert(bytemuck::pod_read_unaligned::<BackendEntry4>(row).counter);
                    }
                    Table::Backends6 => {
                        counters.insert(bytemuck::pod_read_unaligned::<BackendEntry6>(row).counter);
                    }
                    Table::Members4 | Table::Members6 => {
                        counters.insert(bytemuck::pod_read_unaligned::<CounterIndex>(row));
                    }
                    Table::NodeAddrs
                    | Table::Forwards
                    | Table::ForwardRows
                    | Table::ForwardNodes
                    | Table::ForwardNumbers => {}
                }
            }
        }
        counters
    }

    /// The counters that have an owner.
    pub(super) fn owned_counters(&self) -> BTreeSet<CounterIndex> {
        (0..).zip(&self.owners).filter(|(_, owner)| **owner != 0).map(|(counter, _)| counter).collect()
    }

    fn get<V: bytemuck::AnyBitPattern>(&self, table: Table, key: &impl bytemuck::NoUninit) -> Option<V> {
        let (_, rows) = &self.tables[self.active.index()][table.index()];
        rows.get(bytemuck::bytes_of(key)).map(|it| bytemuck::pod_read_unaligned(it))
    }
}

fn refused(call: &'static str, table: Table, errno: i32) -> Error {
    Error::Syscall { call, what: table.to_string(), source: io::Error::from_raw_os_error(errno) }
}

impl MapStore for FakeMaps {
    fn active(&self) -> Result<Side, Error> {
        Ok(self.active)
    }

    fn activate(&mut self, side: Side) -> Result<(), Error> {
        self.outcome("activate", Table::Frontends4, 0).1?;
        self.is_read[self.active.index()] = true;
        self.active = side;
        Ok(())
    }

    fn wait_grace_period(&mut self) -> Result<(), Error> {
        self.outcome("grace", Table::Frontends4, 0).1?;
        self.is_read[self.active.other().index()] = false;
        Ok(())
    }

    fn replace(&mut self, side: Side, maps: &[(Table, u32)]) -> Result<(), Error> {
        for (table, capacity) in maps {
            self.outcome("replace", *table, 0).1?;
            *self.writable(side, *table) = (*capacity, Rows::new());
        }
        Ok(())
    }

    fn set_prefilter(&mut self, side: Side, prefilter: &Prefilter) -> Result<(), Error> {
        self.outcome("set_prefilter", Table::NodePorts, 0).1?;
        self.writable(side, Table::NodePorts);
        self.prefilters[side.index()] = *prefilter;
        Ok(())
    }

    fn put(&mut self, side: Side, table: Table, keys: &[u8], values: &[u8]) -> Result<(), Error> {
        let n = keys.len() / table.entry().key;
        assert_eq!(n * table.entry().key, keys.len());
        assert_eq!(n * table.entry().value, values.len());
        let (written, result) = self.outcome("put", table, n);
        let (capacity, rows) = self.writable(side, table);
        let entries = keys.chunks(table.entry().key).zip(values.chunks(table.entry().value));
        for (key, value) in entries.take(written) {
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
        result
    }

    fn delete(&mut self, side: Side, table: Table, keys: &[u8]) -> Result<(), Error> {
        let (deleted, result) = self.outcome("delete", table, keys.len() / table.entry().key);
        let (_, rows) = self.writable(side, table);
        assert!(!table.is_array(), "entries of {table} cannot be deleted");
        for key in keys.chunks(table.entry().key).take(deleted) {
            assert!(rows.remove(key).is_some(), "an entry of {table} was deleted that does not exist");
        }
        result
    }

    fn counter_owners(&self) -> Result<Vec<u64>, Error> {
        Ok(self.owners.clone())
    }

    fn set_counter_owners(&mut self, owners: &[(CounterIndex, u64)]) -> Result<(), Error> {
        let (written, result) = self.outcome("set_counter_owners", Table::Frontends4, owners.len());
        let reachable = self.reachable_counters();
        for (counter, owner) in &owners[..written] {
            let index = *counter as usize;
            self.owners.resize(self.owners.len().max(index + 1).next_multiple_of(COUNTERS_PER_CHUNK), 0);
            assert!(
                self.owners[index] == *owner || !reachable.contains(counter),
                "counter {counter} got a new owner while a program could increment it"
            );
            self.owners[index] = *owner;
        }
        result
    }

    fn open_connections(&self) -> Result<Vec<i64>, Error> {
        Ok(vec![0; self.owners.len()])
    }
}
