//! The kernel's maps as text: one line per entry, sorted, so that equal generations have equal dumps.
//!
//! Ids and positions are resolved, because they depend on the history. A backend that several frontends share has a line for
//! each of them; an entry that no frontend refers to is shown as an orphan, with its id or position.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
};

use bytemuck::{AnyBitPattern, Zeroable as _};
use datapath::{ActiveFrontend, FrontendAddress, PortId, unspecified};
use proxy_common::{
    counters::CounterIndex,
    net::{V4, V6},
    tables::{BackendSetMember, Family as _, Frontend, NodeAddrScope, NodePortKey, TCP, UDP},
};

use crate::{
    bpf_maps,
    error::Error,
    pins::Pins,
    store::Table,
    table_family::{TableFamily, for_family},
};

/// How often to read again because another generation became active meanwhile.
const MAX_ATTEMPTS: usize = 20;

/// Reads the active generation, and describes every entry of it.
///
/// # Errors
///
/// If no generation was ever active, or it changes faster than it can be read; if a map is missing, has another layout or
/// cannot be read.
pub fn dump(pin_dir: &Path) -> Result<Vec<String>, Error> {
    active_generation(pin_dir).map(|(_, it)| it.lines())
}

/// Reads the frontends of the active generation, in ascending order.
///
/// # Errors
///
/// As for [`dump`].
pub fn active_frontends(pin_dir: &Path) -> Result<Vec<ActiveFrontend>, Error> {
    active_generation(pin_dir).map(|(_, it)| it.active_frontends())
}

/// Reads the number of the active generation: how many have been active so far.
///
/// # Errors
///
/// As for [`dump`].
pub fn generation(pin_dir: &Path) -> Result<u32, Error> {
    bpf_maps::read_active(&initialized(pin_dir)?).map(|(_, flips)| flips)
}

/// The pins below a folder, if a generation was ever active there.
fn initialized(pin_dir: &Path) -> Result<Pins, Error> {
    let pins = Pins::new(pin_dir);
    if bpf_maps::is_initialized(&pins)? {
        Ok(pins)
    } else {
        Err(Error::NotInitialized(pin_dir.to_path_buf()))
    }
}

/// The active generation, with its number.
pub(super) fn active_generation(pin_dir: &Path) -> Result<(u32, Generation), Error> {
    let pins = initialized(pin_dir)?;
    let generation = read_unchanged(
        || bpf_maps::read_active(&pins),
        |(side, flips)| {
            let read = |table: Table| bpf_maps::read(&pins.inner(side, table), table.entry());
            Ok((flips, Generation::read(read)?))
        },
    )?;
    generation.ok_or_else(|| Error::ConcurrentUpdate(pin_dir.to_path_buf()))
}

/// Reads what a word selects. If the word changes meanwhile, the result could be a mixture: then it is read again;
/// `None` after too many attempts.
fn read_unchanged<W: Copy + PartialEq, T>(
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
pub(super) type Entries = (Vec<u8>, Vec<u8>);

/// A frontend: its name, its IP version and its row.
pub(super) type NamedFrontend = (String, u8, Frontend);

/// The entries of a generation, resolved.
#[derive(Default)]
pub(super) struct Generation {
    frontends: Vec<NamedFrontend>,
    /// By IP version and position, with the counters of their connections.
    backends: BTreeMap<(u8, u32), (SocketAddr, CounterIndex)>,
    members: Vec<(u32, SocketAddr)>,
    node_addresses: Vec<(IpAddr, NodeAddrScope)>,
}

/// The frontend of the node port, which has the unspecified address.
fn node_port(destination: &FrontendAddress) -> FrontendAddress {
    let address = SocketAddr::new(unspecified(destination.family()), destination.address.port());
    FrontendAddress { address, ..*destination }
}

impl Generation {
    /// Reads a generation of which `entries` returns the keys and values of each table, concatenated.
    pub(super) fn read(entries: impl Fn(Table) -> Result<Entries, Error>) -> Result<Self, Error> {
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
                let (backend, counter) = F::backend_of(row);
                let backend = F::socket_addr(F::sock_addr(backend));
                self.backends.insert((F::VERSION, position), (backend, counter));
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

    pub(super) fn active_frontends(&self) -> Vec<ActiveFrontend> {
        let mut frontends: Vec<_> = self.frontends.iter().map(|it| self.active_frontend(it)).collect();
        frontends.sort_unstable();
        frontends
    }

    /// A frontend with its backends.
    pub(super) fn active_frontend(&self, frontend: &NamedFrontend) -> ActiveFrontend {
        let mut backends: Vec<_> = self.backends_of(frontend).map(|(_, (backend, _))| backend).collect();
        backends.sort_unstable();
        let (name, _, row) = frontend;
        ActiveFrontend { frontend: name.clone(), backends, port: Some(PortId(row.service_port)) }
    }

    /// Whether the port of a destination is a node port.
    pub(super) fn has_node_port(&self, destination: &FrontendAddress) -> bool {
        self.named(&node_port(destination)).is_some()
    }

    fn named(&self, address: &FrontendAddress) -> Option<&NamedFrontend> {
        let name = address.to_string();
        self.frontends.iter().find(|(it, ..)| *it == name)
    }

    /// The frontend that a connection to an address is redirected by, as [`proxy_common::decide`] finds it: that of the
    /// address, or else that of the node port.
    pub(super) fn frontend_at(&self, destination: &FrontendAddress) -> Option<&NamedFrontend> {
        self.named(destination).or_else(|| {
            let family = destination.family();
            let key: IpAddr =
                for_family!(family, F => F::of(destination.address.ip()).node_addr_key()).into();
            let (_, scope) = self.node_addresses.iter().find(|(it, _)| *it == key)?;
            let node_port = self.named(&node_port(destination))?;
            let is_served = *scope != NodeAddrScope::REMOTE || !node_port.2.options.local_addresses_only();
            is_served.then_some(node_port)
        })
    }

    /// The backends of a frontend and their counters, with their keys in `backends`.
    pub(super) fn backends_of(
        &self,
        (_, version, row): &NamedFrontend,
    ) -> impl Iterator<Item = ((u8, u32), (SocketAddr, CounterIndex))> {
        let end = row.backend_offset.saturating_add(row.backend_count);
        self.backends.range((*version, row.backend_offset)..(*version, end)).map(|(key, it)| (*key, *it))
    }

    /// A line for each entry, sorted.
    pub(super) fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut names_by_set: HashMap<u32, Vec<&str>> = HashMap::new();
        let mut orphans = self.backends.clone();
        for frontend in &self.frontends {
            let (name, _, row) = frontend;
            names_by_set.entry(row.set).or_default().push(name);
            let mut line = format!("frontend {name} backends={}", row.backend_count);
            if row.affinity_timeout != 0 {
                line += &format!(" affinity={}s", row.affinity_timeout);
            }
            if row.options.local_addresses_only() {
                line += " local-addresses-only";
            }
            if row.options.least_connections() {
                line += " least-connections";
            }
            if row.options.slow_start() != 0 {
                line += &format!(" slow-start={}s", row.options.slow_start());
            }
            if row.options.is_to_packets() {
                line += " to-packets";
            }
            lines.push(line);
            for (key, (backend, _)) in self.backends_of(frontend) {
                lines.push(format!("backend {name} -> {backend}"));
                orphans.remove(&key);
            }
        }
        for ((_, position), (backend, _)) in orphans {
            lines.push(format!("orphan backend position={position} -> {backend}"));
        }
        for (set, backend) in &self.members {
            match names_by_set.get(set) {
                Some(names) => lines.extend(names.iter().map(|it| format!("member {it} {backend}"))),
                None => lines.push(format!("orphan member set={set} {backend}")),
            }
        }
        lines.extend(self.node_addresses.iter().map(|(address, scope)| match *scope {
            NodeAddrScope::LOCAL => format!("node-address {address} local"),
            NodeAddrScope::REMOTE => format!("node-address {address} remote"),
            NodeAddrScope::LOOPBACK => format!("node-address {address} loopback"),
            NodeAddrScope::INTERFACE => format!("node-address {address} interface"),
            NodeAddrScope(unknown) => format!("node-address {address} {unknown}"),
        }));
        lines.sort_unstable();
        lines
    }
}

/// The rows of a table.
pub(super) fn rows<K: AnyBitPattern, V: AnyBitPattern>(
    (keys, values): &Entries,
) -> impl Iterator<Item = (K, V)> {
    let keys = keys.chunks_exact(size_of::<K>()).map(bytemuck::pod_read_unaligned);
    let values = values.chunks_exact(size_of::<V>()).map(bytemuck::pod_read_unaligned);
    keys.zip(values)
}

fn frontend_name(address: SocketAddr, protocol: u8) -> String {
    match protocol {
        TCP => format!("{address}/TCP"),
        UDP => format!("{address}/UDP"),
        other => format!("{address}/{other}"),
    }
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
