//! The entries of each table as the kernel takes them.

use std::net::{IpAddr, SocketAddr};

use bytemuck::Zeroable as _;
use datapath::FrontendAddress;
use model::{Family, Protocol};
use proxy_common::{
    counters::CounterIndex,
    net::{Be16, V4, V6},
    tables::{Frontend, Network, NodeAddrScope, NodePortKey, TCP, UDP, network4, network6},
};

use crate::{map_updates::MapUpdates, store::Table, table_family::TableFamily};

pub(super) fn frontend_table(address: FrontendAddress) -> Table {
    match address.address.ip() {
        ip if ip.is_unspecified() => Table::NodePorts,
        IpAddr::V4(_) => Table::Frontends4,
        IpAddr::V6(_) => Table::Frontends6,
    }
}

pub(super) fn backend_table(family: Family) -> Table {
    match family {
        Family::V4 => Table::Backends4,
        Family::V6 => Table::Backends6,
    }
}

pub(super) fn member_table(family: Family) -> Table {
    match family {
        Family::V4 => Table::Members4,
        Family::V6 => Table::Members6,
    }
}

/// The network of an address in the prefilter.
pub(super) fn network(address: IpAddr) -> Network {
    match address {
        IpAddr::V4(ip) => network4(ip.into()),
        IpAddr::V6(ip) => network6(ip.into()),
    }
}

/// Writes a frontend, or deletes it if it has no row.
pub(super) fn set_frontend(updates: &mut MapUpdates, address: FrontendAddress, row: Option<&Frontend>) {
    fn set<F: TableFamily>(
        updates: &mut MapUpdates,
        ip: F,
        FrontendAddress { address, protocol }: FrontendAddress,
        row: Option<&Frontend>,
    ) {
        let port = Be16::new(address.port());
        let protocol = if protocol == Protocol::Tcp { TCP } else { UDP };
        let node_port = NodePortKey { port, protocol, ip_version: F::VERSION };
        match (address.ip().is_unspecified(), row) {
            (true, Some(row)) => updates.put(Table::NodePorts, &node_port, row),
            (true, None) => updates.delete(Table::NodePorts, &node_port),
            (false, Some(row)) => updates.put(F::FRONTENDS, &ip.frontend_key(port, protocol), row),
            (false, None) => updates.delete(F::FRONTENDS, &ip.frontend_key(port, protocol)),
        }
    }
    match address.address.ip() {
        IpAddr::V4(ip) => set(updates, V4::from(ip), address, row),
        IpAddr::V6(ip) => set(updates, V6::from(ip), address, row),
    }
}

/// Writes a node address, or deletes it if it has no scope.
pub(super) fn set_node_address(updates: &mut MapUpdates, address: IpAddr, scope: Option<NodeAddrScope>) {
    let key = V6::from(address);
    match scope {
        Some(scope) => updates.put(Table::NodeAddrs, &key, &scope),
        None => updates.delete(Table::NodeAddrs, &key),
    }
}

pub(super) fn put_backend(
    updates: &mut MapUpdates,
    position: u32,
    backend: SocketAddr,
    counter: CounterIndex,
) {
    fn put<F: TableFamily>(
        updates: &mut MapUpdates,
        position: u32,
        backend: SocketAddr,
        counter: CounterIndex,
    ) {
        updates.put(F::BACKENDS, &position, &F::backend_entry(F::backend_at(backend.into()), counter));
    }
    match backend {
        SocketAddr::V4(_) => put::<V4>(updates, position, backend, counter),
        SocketAddr::V6(_) => put::<V6>(updates, position, backend, counter),
    }
}

/// Clears a position of the array of backends: entries of an array cannot be deleted, and zeroes stand for none.
pub(super) fn clear_backend(updates: &mut MapUpdates, family: Family, position: u32) {
    fn clear<F: TableFamily>(updates: &mut MapUpdates, position: u32) {
        updates.put(F::BACKENDS, &position, &F::BackendEntry::zeroed());
    }
    match family {
        Family::V4 => clear::<V4>(updates, position),
        Family::V6 => clear::<V6>(updates, position),
    }
}

/// Writes a member of a set, or deletes it if it has no counter.
pub(super) fn set_member(
    updates: &mut MapUpdates,
    set: u32,
    backend: SocketAddr,
    counter: Option<CounterIndex>,
) {
    fn write<F: TableFamily>(
        updates: &mut MapUpdates,
        set: u32,
        backend: SocketAddr,
        counter: Option<CounterIndex>,
    ) {
        let key = F::member_key(set, F::backend_at(backend.into()));
        match counter {
            Some(counter) => updates.put(F::MEMBERS, &key, &counter),
            None => updates.delete(F::MEMBERS, &key),
        }
    }
    match backend {
        SocketAddr::V4(_) => write::<V4>(updates, set, backend, counter),
        SocketAddr::V6(_) => write::<V6>(updates, set, backend, counter),
    }
}
