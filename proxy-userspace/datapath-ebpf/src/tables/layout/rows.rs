//! The entries of each table as the kernel takes them.

use std::net::{IpAddr, SocketAddr};

use bytemuck::Zeroable as _;
use datapath::FrontendAddress;
use model::Family;
use proxy_common::{
    counters::CounterIndex,
    net::{Be16, V6},
    tables::{Family as TableEntries, Frontend, Network, NodeAddrScope, NodePortKey, network4, network6},
};

use crate::tables::{
    map_updates::MapUpdates,
    store::Table,
    table_family::{TableFamily as _, for_family},
};

pub(super) fn frontend_table(address: FrontendAddress) -> Table {
    match address.address.ip().is_unspecified() {
        true => Table::NodePorts,
        false => for_family!(address.family(), F => F::FRONTENDS),
    }
}

pub(super) fn backend_table(family: Family) -> Table {
    for_family!(family, F => F::BACKENDS)
}

pub(super) fn member_table(family: Family) -> Table {
    for_family!(family, F => F::MEMBERS)
}

/// The network of an address in the prefilter.
pub(super) fn network(address: IpAddr) -> Network {
    match address {
        IpAddr::V4(ip) => network4(ip.into()),
        IpAddr::V6(ip) => network6(ip.into()),
    }
}

/// Writes a frontend, or deletes it if it has no row.
pub(super) fn set_frontend(updates: &mut MapUpdates, frontend: FrontendAddress, row: Option<&Frontend>) {
    let (port, protocol) = (Be16::new(frontend.address.port()), frontend.protocol.number());
    let (ip, table) = (frontend.address.ip(), frontend_table(frontend));
    for_family!(frontend.family(), F => if ip.is_unspecified() {
        updates.set(table, &NodePortKey { port, protocol, ip_version: F::VERSION }, row);
    } else {
        updates.set(table, &F::of(ip).frontend_key(port, protocol), row);
    });
}

/// Writes a node address, or deletes it if it has no scope.
pub(super) fn set_node_address(updates: &mut MapUpdates, address: IpAddr, scope: Option<&NodeAddrScope>) {
    updates.set(Table::NodeAddrs, &V6::from(address), scope);
}

/// Writes a backend to a position of the array, or clears it: entries of an array cannot be deleted, and zeroes stand for none.
pub(super) fn set_backend(
    updates: &mut MapUpdates,
    family: Family,
    position: u32,
    backend: Option<(SocketAddr, CounterIndex)>,
) {
    for_family!(family, F => {
        let entry = |(it, counter): (SocketAddr, _)| F::backend_entry(F::backend_at(it.into()), counter);
        let entry = backend.map_or(<F as TableEntries>::BackendEntry::zeroed(), entry);
        updates.set(F::BACKENDS, &position, Some(&entry));
    });
}

/// Writes a member of a set, or deletes it if it has no counter.
pub(super) fn set_member(
    updates: &mut MapUpdates,
    set: u32,
    backend: SocketAddr,
    counter: Option<CounterIndex>,
) {
    for_family!(Family::of(backend.ip()), F => {
        let key = F::member_key(set, F::backend_at(backend.into()));
        updates.set(F::MEMBERS, &key, counter.as_ref());
    });
}
