//! What the datapath is configured by.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

/// What the datapath is configured by.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Where it listens.
    pub listen_at: ListenAt,
    /// The sources inside the cluster, besides this host.
    pub inside: Vec<IpNet>,
}

/// Where it listens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ListenAt {
    /// At loopback addresses: each Service has one of its own, [`loopback_of`] its cluster IP, and node ports are at
    /// 127.0.0.1. Nobody else reaches them.
    #[default]
    Loopback,
    /// At the addresses of the Services, and node ports at every address, which something else must make local.
    Services,
}

/// The loopback address of a Service: its cluster IP with 127 as the first number (10.96.0.10 is at 127.96.0.10), or the last
/// three bytes of an IPv6 one.
///
/// On Linux every address in 127.0.0.0/8 can be listened at.
pub(crate) fn loopback_of(cluster_ip: IpAddr) -> IpAddr {
    let [b, c, d] = match cluster_ip {
        IpAddr::V4(it) => {
            let [_, b, c, d] = it.octets();
            [b, c, d]
        }
        IpAddr::V6(it) => {
            let [.., b, c, d] = it.octets();
            [b, c, d]
        }
    };
    Ipv4Addr::new(127, b, c, d).into()
}
