//! What a datapath finds in the kernel: its frontends, and what they amount to.

use std::{
    collections::HashSet,
    net::{IpAddr, SocketAddr},
};

use crate::{FrontendAddress, PortId};

/// An active frontend and where it leads.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ActiveFrontend {
    /// The frontend, such as `10.96.0.10:80/TCP`.
    pub frontend: String,
    /// Its backends in ascending order; empty if connections are refused.
    pub backends: Vec<SocketAddr>,
    /// The service port it belongs to, if connections to it are counted.
    pub port: Option<PortId>,
}

/// What frontends amount to, such as `3 Services`; or `3 addresses of Services`, if it is unknown which service ports they
/// belong to.
pub fn described(frontends: impl IntoIterator<Item = (FrontendAddress, Option<PortId>)>) -> String {
    let addresses = frontends.into_iter().map(|(it, port)| (port, it.address.ip()));
    // A node port belongs to a Service that has other addresses.
    let mut addresses: Vec<_> = addresses.filter(|(_, ip)| !ip.is_unspecified()).collect();
    addresses.sort_unstable();
    addresses.dedup();
    match addresses.iter().filter(|(port, _)| port.is_none()).count() {
        0 => {
            // The ports of a Service have the same addresses, and no other Service has all of them.
            let ports = addresses.chunk_by(|(a, _), (b, _)| a == b);
            let services: HashSet<Vec<IpAddr>> =
                ports.map(|it| it.iter().map(|(_, ip)| *ip).collect()).collect();
            model::counted(services.len(), "Service")
        }
        unknown => format!("{unknown} addresses of Services"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_are_counted_by_the_addresses_of_their_ports() {
        let frontends = |list: &[(&str, Option<u64>)]| {
            described(list.iter().map(|(address, port)| (address.parse().unwrap(), port.map(PortId))))
        };
        assert_eq!(frontends(&[]), "0 Services");
        let two = [
            ("10.96.0.1:80/TCP", Some(1)),
            ("[fd00::1]:80/TCP", Some(1)),
            ("203.0.113.1:80/TCP", Some(1)),
            ("0.0.0.0:30080/TCP", Some(1)),
            ("10.96.0.1:443/TCP", Some(2)),
            ("[fd00::1]:443/TCP", Some(2)),
            ("203.0.113.1:443/TCP", Some(2)),
            // Another Service shares an address.
            ("10.96.0.2:53/UDP", Some(3)),
            ("203.0.113.1:53/UDP", Some(3)),
        ];
        assert_eq!(frontends(&two), "2 Services");
        let of_nftables =
            [("10.96.0.1:80/TCP", None), ("10.96.0.1:443/TCP", None), ("10.96.0.2:53/UDP", None)];
        assert_eq!(frontends(&of_nftables), "2 addresses of Services");
    }
}
