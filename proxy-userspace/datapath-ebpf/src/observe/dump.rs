//! The kernel's maps as text: one line per entry, sorted, so that equal generations have equal dumps.
//!
//! Ids and positions are resolved, because they depend on the history. A backend that several frontends share has a line for
//! each of them; an entry that no frontend refers to is shown as an orphan, with its id or position.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::Path,
};

use bytemuck::Zeroable as _;
use datapath::SortedLines;
use proxy_common::{
    net::{V4, V6},
    tables::{BackendSetMember, Frontend, NodeAddrScope, TCP, UDP},
};

#[cfg(any(test, feature = "fuzzing"))]
use crate::observe::active_frontends::{Entries, InMemory};
use crate::{
    error::Error,
    maps::bpf_maps,
    observe::{
        active_frontends::{ActiveFrontends, ReadTables, initialized},
        forwards::ForwardTables,
    },
    tables::{store::Table, table_family::TableFamily},
};

/// Reads the active generation, and describes every entry of it in a line, in order.
///
/// # Errors
///
/// If no generation was ever active, or it changes faster than it can be read, before a line is handed on or later; if a map is
/// missing, has another layout or cannot be read.
pub fn dump(pin_dir: &Path, mut each: impl FnMut(&str)) -> Result<(), Error> {
    let mut active = ActiveFrontends::open(pin_dir)?;
    let (mut last, mut first_generation) = (String::new(), None);
    loop {
        let (generation, mut lines) = active.read(|maps| {
            let mut lines = SortedLines::after(&last);
            list(maps, &mut |it| lines.add(&it))?;
            Ok(lines)
        })?;
        if *first_generation.get_or_insert(generation) != generation {
            return Err(Error::ConcurrentUpdate(pin_dir.to_path_buf()));
        }
        lines.sorted().for_each(&mut each);
        if !lines.has_more() {
            return Ok(());
        }
        last = lines.sorted().next_back().unwrap_or_default().to_owned();
    }
}

/// A line for each entry of tables in memory, in order.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn lines(read: impl Fn(Table) -> Entries) -> Vec<String> {
    let mut lines = Vec::new();
    list(&mut InMemory(read), &mut |it| lines.push(it)).expect("memory can be read");
    lines.sort_unstable();
    lines
}

/// A line for each entry, in no order.
fn list(maps: &mut impl ReadTables, add: &mut dyn FnMut(String)) -> Result<(), Error> {
    // Only UDP and session affinity have members.
    let mut members = Vec::new();
    list_members::<V4>(maps, &mut members)?;
    list_members::<V6>(maps, &mut members)?;
    members.sort_unstable();
    list_family::<V4, _>(maps, &mut members, add)?;
    list_family::<V6, _>(maps, &mut members, add)?;
    for Member { set, backend, .. } in members.iter().filter(|it| !it.has_frontend) {
        add(format!("orphan member set={set} {backend}"));
    }
    ForwardTables::read(maps)?.lines().for_each(&mut *add);
    maps.each(Table::NodeAddrs, |key: V6, scope| add(node_address_line(key.into(), scope)))
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Member {
    set: u32,
    backend: SocketAddr,
    has_frontend: bool,
}

fn list_members<F: TableFamily>(maps: &mut impl ReadTables, members: &mut Vec<Member>) -> Result<(), Error> {
    maps.each(F::MEMBERS, |key, _: BackendSetMember| {
        let (set, backend) = F::member_of(key);
        members.push(Member { set, backend: F::socket_addr(F::sock_addr(backend)), has_frontend: false });
    })
}

/// The frontends and backends of a family, and the members of their sets, which are in order.
fn list_family<F: TableFamily, M: ReadTables>(
    maps: &mut M,
    members: &mut [Member],
    add: &mut dyn FnMut(String),
) -> Result<(), Error> {
    // The positions of each frontend: the first one, and how many.
    let mut used: BTreeMap<u32, u32> = BTreeMap::new();
    let mut list = |maps: &mut M, address: SocketAddr, protocol, row: Frontend| {
        let name = frontend_name(address, protocol);
        add(frontend_line(&name, &row));
        let count = used.entry(row.backend_offset).or_default();
        *count = row.backend_count.max(*count);
        for (backend, _) in maps.backends::<F>(&row)? {
            add(format!("backend {name} -> {backend}"));
        }
        let first = members.partition_point(|it| it.set < row.set);
        for it in members[first..].iter_mut().take_while(|it| it.set == row.set) {
            it.has_frontend = true;
            add(format!("member {name} {}", it.backend));
        }
        Ok(())
    };
    maps.each_frontend::<F>(&mut list)?;
    maps.each_node_port(|maps, address, protocol, row| {
        if address.is_ipv4() == (F::VERSION == 4) { list(maps, address, protocol, row) } else { Ok(()) }
    })?;
    maps.each(F::BACKENDS, |position: u32, row: F::BackendEntry| {
        // Those of two frontends are the same or disjoint.
        let is_used =
            || used.range(..=position).next_back().is_some_and(|(first, it)| position - first < *it);
        if row != F::BackendEntry::zeroed() && !is_used() {
            let backend = F::socket_addr(F::sock_addr(F::backend_of(row).0));
            add(format!("orphan backend position={position} -> {backend}"));
        }
    })
}

fn frontend_line(name: &str, row: &Frontend) -> String {
    let (options, slow_start) = (row.options, row.options.slow_start());
    let all = [
        (row.affinity_timeout != 0).then(|| format!(" affinity={}s", row.affinity_timeout)),
        options.local_addresses_only().then(|| " local-addresses-only".into()),
        options.least_connections().then(|| " least-connections".into()),
        (slow_start != 0).then(|| format!(" slow-start={slow_start}s")),
        options.is_to_packets().then(|| " to-packets".into()),
    ];
    let set: String = all.into_iter().flatten().collect();
    format!("frontend {name} backends={}{set}", row.backend_count)
}

fn node_address_line(address: IpAddr, scope: NodeAddrScope) -> String {
    match scope {
        NodeAddrScope::LOCAL => format!("node-address {address} local"),
        NodeAddrScope::REMOTE => format!("node-address {address} remote"),
        NodeAddrScope::LOOPBACK => format!("node-address {address} loopback"),
        NodeAddrScope::INTERFACE => format!("node-address {address} interface"),
        NodeAddrScope(unknown) => format!("node-address {address} {unknown}"),
    }
}

/// Reads the number of the active generation: how many have been active so far.
///
/// # Errors
///
/// As for [`dump`].
pub fn generation(pin_dir: &Path) -> Result<u32, Error> {
    bpf_maps::read_active(&initialized(pin_dir)?).map(|(_, flips)| flips)
}

fn frontend_name(address: SocketAddr, protocol: u8) -> String {
    match protocol {
        TCP => format!("{address}/TCP"),
        UDP => format!("{address}/UDP"),
        other => format!("{address}/{other}"),
    }
}
