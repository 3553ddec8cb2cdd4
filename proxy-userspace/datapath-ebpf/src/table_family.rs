//! The tables of one address family, so that code for IPv4 and IPv6 is written once.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use bytemuck::Pod;
use proxy_common::{
    counters::CounterIndex,
    net::{Be16, V4, V6},
    tables::{
        BackendEntry4, BackendEntry6, BackendSetMemberKey4, BackendSetMemberKey6, Family, FrontendKey4,
        FrontendKey6,
    },
};

use crate::store::Table;

/// An address family, named by the type of its addresses in map entries.
pub(super) trait TableFamily:
    Family<FrontendKey: Pod, Backend: PartialEq, BackendEntry: Pod + PartialEq, BackendSetMemberKey: Pod>
{
    const FRONTENDS: Table;
    const BACKENDS: Table;
    const MEMBERS: Table;

    /// The address and protocol of a frontend.
    fn frontend(key: Self::FrontendKey) -> (SocketAddr, u8);
    fn backend_entry(backend: Self::Backend, counter: CounterIndex) -> Self::BackendEntry;
    fn socket_addr(backend: Self::Backend) -> SocketAddr;
    /// The set and the backend of a member.
    fn member(key: Self::BackendSetMemberKey) -> (u32, SocketAddr);
}

macro_rules! table_family {
    ($ip:ty, $std:ty, $key:ty, $entry:ident, $member:ty, $frontends:ident, $backends:ident, $members:ident) => {
        impl TableFamily for $ip {
            const FRONTENDS: Table = Table::$frontends;
            const BACKENDS: Table = Table::$backends;
            const MEMBERS: Table = Table::$members;

            fn frontend(key: $key) -> (SocketAddr, u8) {
                (socket_addr::<$std>(key.address, key.port), key.protocol)
            }

            fn backend_entry(backend: Self::Backend, counter: CounterIndex) -> $entry {
                $entry { backend, counter }
            }

            fn socket_addr(backend: Self::Backend) -> SocketAddr {
                socket_addr::<$std>(backend.address, backend.port)
            }

            fn member(key: $member) -> (u32, SocketAddr) {
                (key.set, Self::socket_addr(key.backend))
            }
        }
    };
}

/// A socket address of the same family, also if it is v4-mapped.
fn socket_addr<T: Into<std::net::IpAddr>>(ip: impl Into<T>, port: Be16) -> SocketAddr {
    SocketAddr::new(ip.into().into(), port.get())
}

table_family!(
    V4,
    Ipv4Addr,
    FrontendKey4,
    BackendEntry4,
    BackendSetMemberKey4,
    Frontends4,
    Backends4,
    Members4
);
table_family!(
    V6,
    Ipv6Addr,
    FrontendKey6,
    BackendEntry6,
    BackendSetMemberKey6,
    Frontends6,
    Backends6,
    Members6
);
