//! Where the proxy listens.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use clap::ValueEnum;
use proxy_contract::backend::Family;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ListenAt {
    /// At 127.96.0.10 for the cluster IP 10.96.0.10, and at 127.0.0.1 for node ports, for programs of this machine; a port
    /// below 1024 that this user may not listen at is 10000 higher
    Loopback,
    /// At the addresses of the Services, which must be local, as by `ip route add local 10.96.0.0/12 dev lo`, and at every
    /// address for node ports
    Services,
}

/// The loopback address of a Service: its cluster IP with 127 as the first number (10.96.0.10 is at 127.96.0.10), or the last
/// three bytes of an IPv6 one.
///
/// On Linux and Windows every address in 127.0.0.0/8 can be listened at.
pub(crate) fn loopback_of(cluster_ip: IpAddr) -> IpAddr {
    let bits = match cluster_ip {
        IpAddr::V4(it) => it.to_bits(),
        IpAddr::V6(it) => it.to_bits() as u32,
    };
    Ipv4Addr::from_bits(127 << 24 | bits & 0x00ff_ffff).into()
}

/// The address that stands for every address of the machine.
pub(crate) fn unspecified(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    }
}
