//! The entries of a generation, resolved all at once: what `dump` lists piece by piece must be the same. For tests and fuzzing.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use bytemuck::Zeroable as _;
use proxy_common::{
    forward::{ForwardNode, RowPair},
    net::{V4, V6},
    tables::{BackendSetMember, Frontend, NodeAddrScope, NodePortKey},
};

use crate::{
    error::Error,
    observe::{
        active_frontends::{Entries, rows},
        dump::{frontend_line, frontend_name, node_address_line},
        forwards::{ForwardTables, rows_of},
    },
    tables::{store::Table, table_family::TableFamily},
};

/// A frontend: its name, its IP version and its row.
type NamedFrontend = (String, u8, Frontend);

/// The entries of a generation, resolved.
#[derive(Default)]
pub(crate) struct Generation {
    frontends: Vec<NamedFrontend>,
    /// By IP version and position.
    backends: BTreeMap<(u8, u32), SocketAddr>,
    members: Vec<(u32, SocketAddr)>,
    node_addresses: Vec<(IpAddr, NodeAddrScope)>,
    forwards: ForwardTables,
}

impl Generation {
    /// Reads a generation of which `entries` returns the keys and values of each table, concatenated.
    pub(crate) fn read(entries: impl Fn(Table) -> Result<Entries, Error>) -> Result<Self, Error> {
        let mut it = Self::default();
        it.read_family::<V4>(&entries)?;
        it.read_family::<V6>(&entries)?;
        for (key, row) in rows::<NodePortKey, Frontend>(&entries(Table::NodePorts)?) {
            let any: IpAddr = match key.ip_version {
                4 => Ipv4Addr::UNSPECIFIED.into(),
                _ => Ipv6Addr::UNSPECIFIED.into(),
            };
            let address = SocketAddr::new(any, key.port.get());
            it.frontends.push((frontend_name(address, key.protocol), key.ip_version, row));
        }
        for (key, scope) in rows::<V6, NodeAddrScope>(&entries(Table::NodeAddrs)?) {
            it.node_addresses.push((key.into(), scope));
        }
        it.forwards.forwards.extend(rows(&entries(Table::Forwards)?));
        let pairs = entries(Table::ForwardRows)?;
        it.forwards.rows.extend(rows::<u32, RowPair>(&pairs).flat_map(rows_of));
        it.forwards.nodes.extend(rows::<u32, ForwardNode>(&entries(Table::ForwardNodes)?));
        Ok(it)
    }

    fn read_family<F: TableFamily>(
        &mut self,
        entries: &impl Fn(Table) -> Result<Entries, Error>,
    ) -> Result<(), Error> {
        for (key, row) in rows::<F::FrontendKey, Frontend>(&entries(F::FRONTENDS)?) {
            let (address, protocol) = F::frontend_of(key);
            self.frontends.push((frontend_name(F::socket_addr(address), protocol), F::VERSION, row));
        }
        for (position, row) in rows::<u32, F::BackendEntry>(&entries(F::BACKENDS)?) {
            if row != F::BackendEntry::zeroed() {
                let backend = F::socket_addr(F::sock_addr(F::backend_of(row).0));
                self.backends.insert((F::VERSION, position), backend);
            }
        }
        let members = entries(F::MEMBERS)?;
        let members = rows::<F::BackendSetMemberKey, BackendSetMember>(&members);
        self.members.extend(members.map(|(key, _)| {
            let (set, backend) = F::member_of(key);
            (set, F::socket_addr(F::sock_addr(backend)))
        }));
        Ok(())
    }

    /// The name of each frontend, and its number of backends.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn frontends(&self) -> impl Iterator<Item = (&str, usize)> {
        self.frontends.iter().map(|it| (&*it.0, self.backends_of(it).count()))
    }

    /// The backends of a frontend, with their keys in `backends`.
    fn backends_of(
        &self,
        (_, version, row): &NamedFrontend,
    ) -> impl Iterator<Item = ((u8, u32), SocketAddr)> {
        let end = row.backend_offset.saturating_add(row.backend_count);
        self.backends.range((*version, row.backend_offset)..(*version, end)).map(|(key, it)| (*key, *it))
    }

    /// A line for each entry, sorted: what [`dump`](crate::observe::dump()) lists without reading everything at once.
    pub(crate) fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut names_by_set: HashMap<u32, Vec<&str>> = HashMap::new();
        let mut orphans = self.backends.clone();
        for frontend in &self.frontends {
            let (name, _, row) = frontend;
            names_by_set.entry(row.set).or_default().push(name);
            lines.push(frontend_line(name, row));
            for (key, backend) in self.backends_of(frontend) {
                lines.push(format!("backend {name} -> {backend}"));
                orphans.remove(&key);
            }
        }
        for ((_, position), backend) in orphans {
            lines.push(format!("orphan backend position={position} -> {backend}"));
        }
        for (set, backend) in &self.members {
            match names_by_set.get(set) {
                Some(names) => lines.extend(names.iter().map(|it| format!("member {it} {backend}"))),
                None => lines.push(format!("orphan member set={set} {backend}")),
            }
        }
        lines.extend(self.node_addresses.iter().map(|(address, scope)| node_address_line(*address, *scope)));
        lines.extend(self.forwards.lines());
        lines.sort_unstable();
        lines
    }
}
