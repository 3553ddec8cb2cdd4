//! Compiles one Service: which addresses it answers at, and where each leads. Pure and total.
//!
//! Ids and slots are not given here but in [`super::layout`], which remembers what is where.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use model::{
    Family, Protocol,
    state::{Scope, ServiceState},
};

use crate::Rejected;

/// An address that a Service answers at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct FrontendAddress {
    /// Its IP address and port.
    pub address: SocketAddr,
    /// Its transport.
    pub transport: Transport,
}

impl fmt::Display for FrontendAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.transport)
    }
}

/// A protocol that is translated at socket level. SCTP sockets pass no hook; they are left to the packet path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Transport {
    /// The IP protocol number.
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Tcp => proxy_common::tables::TCP,
            Self::Udp => proxy_common::tables::UDP,
        }
    }

    fn of(protocol: Protocol) -> Option<Self> {
        match protocol {
            Protocol::Tcp => Some(Self::Tcp),
            Protocol::Udp => Some(Self::Udp),
            Protocol::Sctp => None,
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
        })
    }
}

/// One Service, compiled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ServiceImage {
    /// Its addresses, each with the position of its set in `sets`.
    pub frontends: Vec<(FrontendAddress, usize)>,
    /// Where its addresses lead.
    pub sets: Vec<SetImage>,
    /// What of it is not served.
    pub rejected: Vec<Rejected>,
}

/// The backends behind some of a Service's addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SetImage {
    /// The family of all of them.
    pub family: Family,
    /// The transport of the frontends that use it.
    pub transport: Transport,
    /// The backends, sorted, each once.
    pub backends: Vec<SocketAddr>,
}

/// Compiles a Service's cluster IPs, each port of each family with the endpoints for inside traffic.
///
/// A port whose set is empty refuses, also where an endpoint on another node could serve it (internal policy Local):
/// a socket that asks here can only be answered here, and at once is better than never.
pub(super) fn compile(state: &ServiceState) -> ServiceImage {
    let mut image = ServiceImage::default();
    let service = &state.service;
    for &ip in &service.cluster_ips {
        if let Some(reason) = unusable(ip) {
            image.rejected.push(Rejected { item: format!("{} address {ip}", service.name), reason });
            continue;
        }
        let family = Family::of(ip);
        for (index, port) in service.ports.iter().enumerate() {
            if port.lost.contains(&ip) {
                continue;
            }
            let Some(transport) = Transport::of(port.protocol) else { continue };
            let frontend = FrontendAddress { address: SocketAddr::new(ip, port.port.get()), transport };
            if image.frontends.iter().any(|(it, _)| *it == frontend) {
                image.rejected.push(Rejected {
                    item: format!("{} port {}/{transport}", service.name, port.port),
                    reason: format!("{frontend} is named twice by this Service; the first one counts"),
                });
                continue;
            }
            let mut backends: Vec<_> = state.targets(index, family, Scope::Internal).collect();
            backends.sort_unstable();
            backends.dedup();
            image.frontends.push((frontend, image.sets.len()));
            image.sets.push(SetImage { family, transport, backends });
        }
    }
    image
}

/// Why no socket may be translated for this address, if so.
fn unusable(ip: IpAddr) -> Option<String> {
    let what = match ip {
        _ if ip.is_unspecified() => "the unspecified address",
        _ if ip.is_loopback() => "a loopback address",
        _ if ip.is_multicast() => "a multicast address",
        // A socket that asks for it is looked up by the v4 address inside; the Service must name that.
        IpAddr::V6(it) if it.to_ipv4_mapped().is_some() => "a v4-mapped address",
        _ => return None,
    };
    Some(format!("{what} cannot be a Service's; give it one from the service CIDR"))
}
