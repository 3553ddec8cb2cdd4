//! The tables of one address family, so that code for IPv4 and IPv6 is written once.

use std::net::{IpAddr, SocketAddr};

use bytemuck::Pod;
use proxy_common::{
    net::{SockAddr, V4, V6},
    tables::Family,
};

use crate::tables::store::Table;

/// An address family, named by the type of its addresses in map entries.
pub(crate) trait TableFamily:
    Family<FrontendKey: Pod, Backend: PartialEq, BackendEntry: Pod + PartialEq, BackendSetMemberKey: Pod>
{
    const FRONTENDS: Table;
    const BACKENDS: Table;
    const MEMBERS: Table;

    /// The same address, which is one of this family.
    fn of(address: IpAddr) -> Self {
        Self::from_mapped(address.into()).unwrap_or_default()
    }

    /// The same address, of this family also if it is v4-mapped.
    fn socket_addr(SockAddr { ip, port, .. }: SockAddr) -> SocketAddr {
        let ip = if Self::VERSION == 6 { IpAddr::V6(ip.into()) } else { ip.into() };
        SocketAddr::new(ip, port.get())
    }
}

impl TableFamily for V4 {
    const FRONTENDS: Table = Table::Frontends4;
    const BACKENDS: Table = Table::Backends4;
    const MEMBERS: Table = Table::Members4;
}

impl TableFamily for V6 {
    const FRONTENDS: Table = Table::Frontends6;
    const BACKENDS: Table = Table::Backends6;
    const MEMBERS: Table = Table::Members6;
}

/// Evaluates an expression for the [`TableFamily`] of a [`model::Family`].
macro_rules! for_family {
    ($family:expr, $F:ident => $then:expr) => {
        match $family {
            model::Family::V4 => {
                type $F = proxy_common::net::V4;
                $then
            }
            model::Family::V6 => {
                type $F = proxy_common::net::V6;
                $then
            }
        }
    };
}
pub(crate) use for_family;
