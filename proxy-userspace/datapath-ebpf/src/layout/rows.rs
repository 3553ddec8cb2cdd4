//! The rows of each table: which table something belongs to, and its keys and values as the kernel takes them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use bytemuck::Zeroable as _;
use model::Family;
use proxy_common::{
    counters::CounterIndex,
    net::{Be16, V6},
    tables::{
        Backend4, Backend6, BackendEntry4, BackendEntry6, BackendSetMemberKey4, BackendSetMemberKey6,
        Frontend, FrontendKey4, FrontendKey6, Network, NodeAddrScope, NodePortKey, network4, network6,
    },
};

use crate::{compile::FrontendAddress, map_updates::Changes, store::Table};

pub(super) fn frontend_table(address: FrontendAddress) -> Table {
    if address.address.ip().is_unspecified() {
        return Table::NodePorts;
    }
    if address.address.is_ipv4() { Table::Frontends4 } else { Table::Frontends6 }
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

/// Calls `$then` with the key of a frontend, whatever its family.
macro_rules! with_frontend_key {
    ($address:expr, |$table:ident, $key:ident| $then:expr) => {{
        let (port, protocol) = (Be16::new($address.address.port()), $address.transport.number());
        match $address.address.ip() {
            ip if ip.is_unspecified() => {
                let family = if ip.is_ipv4() { 4 } else { 6 };
                let ($table, $key) = (Table::NodePorts, NodePortKey { port, protocol, ip_version: family });
                $then
            }
            IpAddr::V4(ip) => {
                let ($table, $key) =
                    (Table::Frontends4, FrontendKey4 { address: ip.into(), port, protocol, zero: 0 });
                $then
            }
            IpAddr::V6(ip) => {
                let ($table, $key) =
                    (Table::Frontends6, FrontendKey6 { address: ip.into(), port, protocol, zero: 0 });
                $then
            }
        }
    }};
}

pub(super) fn put_frontend(changes: &mut Changes, address: FrontendAddress, row: &Frontend) {
    with_frontend_key!(address, |table, key| changes.put(table, &key, row));
}

pub(super) fn delete_frontend(changes: &mut Changes, address: FrontendAddress) {
    with_frontend_key!(address, |table, key| changes.delete(table, &key));
}

pub(super) fn put_place(changes: &mut Changes, address: IpAddr, place: NodeAddrScope) {
    changes.put(Table::NodeAddrs, &V6::from(address), &place);
}

pub(super) fn delete_place(changes: &mut Changes, address: IpAddr) {
    changes.delete(Table::NodeAddrs, &V6::from(address));
}

pub(super) fn put_backend(changes: &mut Changes, position: u32, backend: SocketAddr, cell: CounterIndex) {
    let port = Be16::new(backend.port());
    match backend.ip() {
        IpAddr::V4(ip) => {
            let backend = Backend4 { address: ip.into(), port, zero: 0 };
            changes.put(Table::Backends4, &position, &BackendEntry4 { backend, counter: cell });
        }
        IpAddr::V6(ip) => {
            let backend = Backend6 { address: ip.into(), port, zero: 0 };
            changes.put(Table::Backends6, &position, &BackendEntry6 { backend, counter: cell });
        }
    }
}

/// Nothing can be taken out of an array: zeroes stand for nothing.
pub(super) fn clear_backend(changes: &mut Changes, family: Family, position: u32) {
    match family {
        Family::V4 => changes.put(Table::Backends4, &position, &BackendEntry4::zeroed()),
        Family::V6 => changes.put(Table::Backends6, &position, &BackendEntry6::zeroed()),
    }
}

/// The network that a frontend's address is in.
pub(super) fn network(address: IpAddr) -> Network {
    match address {
        IpAddr::V4(ip) => network4(ip.into()),
        IpAddr::V6(ip) => network6(ip.into()),
    }
}

fn member_key4(set: u32, ip: Ipv4Addr, port: Be16) -> BackendSetMemberKey4 {
    BackendSetMemberKey4 { set, backend: Backend4 { address: ip.into(), port, zero: 0 } }
}

fn member_key6(set: u32, ip: Ipv6Addr, port: Be16) -> BackendSetMemberKey6 {
    BackendSetMemberKey6 { set, backend: Backend6 { address: ip.into(), port, zero: 0 } }
}

pub(super) fn put_member(changes: &mut Changes, set: u32, backend: SocketAddr, cell: CounterIndex) {
    let port = Be16::new(backend.port());
    match backend.ip() {
        IpAddr::V4(ip) => changes.put(Table::Members4, &member_key4(set, ip, port), &cell),
        IpAddr::V6(ip) => changes.put(Table::Members6, &member_key6(set, ip, port), &cell),
    }
}

pub(super) fn delete_member(changes: &mut Changes, set: u32, backend: SocketAddr) {
    let port = Be16::new(backend.port());
    match backend.ip() {
        IpAddr::V4(ip) => changes.delete(Table::Members4, &member_key4(set, ip, port)),
        IpAddr::V6(ip) => changes.delete(Table::Members6, &member_key6(set, ip, port)),
    }
}
