//! The address of a frontend.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
};

use model::{Family, Protocol};

/// The address of a frontend; a node port has the unspecified address of its family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrontendAddress {
    pub address: SocketAddr,
    pub protocol: Protocol,
}

impl FrontendAddress {
    pub fn family(&self) -> Family {
        Family::of(self.address.ip())
    }
}

impl fmt::Display for FrontendAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.protocol)
    }
}

impl FromStr for FrontendAddress {
    type Err = String;

    /// Parses what [`Display`](fmt::Display) writes.
    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || format!("{text}: not an address with a port and a protocol");
        let (address, protocol) = text.rsplit_once('/').ok_or_else(invalid)?;
        let (address, protocol) = (address.parse().ok(), protocol.parse().ok());
        address.zip(protocol).map(|(address, protocol)| Self { address, protocol }).ok_or_else(invalid)
    }
}

/// The unspecified address, which stands for every address at which node ports are served.
pub fn unspecified(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Why an address cannot be a frontend's; `None` if it can. Both datapaths give the same reason, so that it is reported once.
pub fn invalid_address_reason(ip: IpAddr) -> Option<String> {
    let what = match ip {
        _ if ip.is_unspecified() => "the unspecified address",
        _ if ip.is_loopback() => "a loopback address",
        _ if ip.is_multicast() => "a multicast address",
        // A socket that connects to it is looked up by the IPv4 address inside, which the Service has to list.
        IpAddr::V6(it) if it.to_ipv4_mapped().is_some() => "a v4-mapped address",
        _ => return None,
    };
    Some(format!("{what} cannot be used for a Service; use one from the service CIDR"))
}
