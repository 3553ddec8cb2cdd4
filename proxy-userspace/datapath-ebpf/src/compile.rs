//! Compiles one Service: which addresses it answers at, and where each leads. Pure and total.
//!
//! Ids and slots are not given here but in [`super::layout`], which remembers what is where.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    num::NonZeroU16,
};

use model::{
    Family, Protocol, ServiceName,
    state::{Scope, ServicePort, ServiceState, TrafficPolicy},
};

use model::Rejected;
use twox_hash::XxHash64;

use datapath::FrontendKind;

/// An address that a Service answers at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct FrontendAddress {
    /// Its IP address and port; of a node port the unspecified address, which stands for every node's.
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

    /// The transport of a protocol, if it is translated.
    pub(super) fn of(protocol: Protocol) -> Option<Self> {
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

/// One address of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frontend {
    /// The address.
    pub(super) address: FrontendAddress,
    /// Why the Service answers there.
    pub(super) claim: FrontendKind,
    /// The position of its set in [`ServiceImage::sets`].
    pub(super) set: usize,
    /// Seconds after its last connection for which a client keeps its backend; 0 for no affinity.
    pub(super) affinity: u32,
    /// Which service port it is: the same for the same names, whenever and wherever.
    pub(super) service: u64,
    /// Whether it is left untouched at the addresses of other nodes, which decide for themselves.
    pub(super) own_addresses_only: bool,
}

/// One Service, compiled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ServiceImage {
    /// Its addresses, each once.
    pub(super) frontends: Vec<Frontend>,
    /// Where its addresses lead.
    pub(super) sets: Vec<SetImage>,
    /// What of it is not served.
    pub(super) rejected: Vec<Rejected>,
}

/// The backends behind some of a Service's addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SetImage {
    /// The service port whose set it is: connections are counted for each by itself.
    pub(super) service: u64,
    /// The family of all of them.
    pub(super) family: Family,
    /// Whether its backends are listed as members, because clients return to them: those of UDP, and with affinity.
    pub(super) is_listed: bool,
    /// The backends, sorted, each once.
    pub(super) backends: Vec<SocketAddr>,
}

/// Compiles a Service: its cluster IPs with the endpoints for inside traffic, its node ports, external and load balancer
/// IPs with those of the short circuit, since whoever has a socket here is inside.
///
/// A port whose set is empty refuses, also where an endpoint on another node could serve it (internal policy Local):
/// a socket that asks here can only be answered here, and at once is better than never.
pub(super) fn compile(state: &ServiceState) -> ServiceImage {
    let service = &state.service;
    let mut compiler =
        Compiler { state, image: ServiceImage::default(), taken: HashSet::new(), sets: HashMap::new() };
    for &ip in &service.cluster_ips {
        compiler.add(ip, FrontendKind::ClusterIp, Scope::Internal);
    }
    for &ip in &service.load_balancer_ips {
        // Who may come is judged by the source address, which a socket has only after routing: left to the packet path.
        let family = Family::of(ip);
        if service.source_ranges.iter().any(|it| Family::of(it.addr()) == family) {
            continue;
        }
        compiler.add(ip, FrontendKind::LoadBalancerIp, Scope::Cluster);
    }
    for &ip in &service.external_ips {
        compiler.add(ip, FrontendKind::ExternalIp, Scope::Cluster);
    }
    for &ip in &service.cluster_ips {
        compiler.add_node_ports(Family::of(ip));
    }
    compiler.image
}

/// A Service that is being compiled.
struct Compiler<'a> {
    state: &'a ServiceState,
    image: ServiceImage,
    /// Where it answers already.
    taken: HashSet<FrontendAddress>,
    /// The positions of the sets of a service port.
    sets: HashMap<u64, Vec<usize>>,
}

impl Compiler<'_> {
    /// Adds every port of the Service at one of its addresses.
    fn add(&mut self, ip: IpAddr, claim: FrontendKind, scope: Scope) {
        let service = &self.state.service;
        if let Some(reason) = unusable(ip) {
            self.image.rejected.push(Rejected { item: format!("{} {claim} {ip}", service.name), reason });
            return;
        }
        for (index, port) in service.ports.iter().enumerate() {
            if !port.conflicting_addresses.contains(&ip) {
                self.add_port((index, port), SocketAddr::new(ip, port.port.get()), claim, scope);
            }
        }
    }

    /// Adds the node ports of one family, whichever address they are asked at.
    fn add_node_ports(&mut self, family: Family) {
        let any = match family {
            Family::V4 => IpAddr::from(Ipv4Addr::UNSPECIFIED),
            Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
        };
        for (index, port) in self.state.service.ports.iter().enumerate() {
            if let Some(number) = port.node_port.map(NonZeroU16::get) {
                let address = SocketAddr::new(any, number);
                self.add_port((index, port), address, FrontendKind::NodePort, Scope::Cluster);
            }
        }
    }

    /// Adds one port at one address.
    fn add_port(
        &mut self,
        (index, port): (usize, &ServicePort),
        address: SocketAddr,
        claim: FrontendKind,
        scope: Scope,
    ) {
        let service = &self.state.service;
        let Some(transport) = Transport::of(port.protocol) else { return };
        let address = FrontendAddress { address, transport };
        if !self.taken.insert(address) {
            self.image.rejected.push(Rejected {
                item: format!("{} {claim} {address}", service.name),
                reason: "this Service names the same address and port before; the first one counts".into(),
            });
            return;
        }
        let family = Family::of(address.address.ip());
        let mut backends = Vec::with_capacity(self.state.endpoints.len());
        backends.extend(self.state.targets(index, family, scope));
        backends.sort_unstable();
        backends.dedup();
        let affinity = service.affinity.map_or(0, |it| it.timeout_seconds.get());
        let is_listed = transport == Transport::Udp || affinity != 0;
        let id = identity(&service.name, &port.name, transport);
        let set = self.set(SetImage { service: id, family, is_listed, backends });
        let own_addresses_only =
            claim == FrontendKind::NodePort && service.external_policy == TrafficPolicy::Local;
        let frontend = Frontend { address, claim, set, affinity, service: id, own_addresses_only };
        self.image.frontends.push(frontend);
    }

    /// The position of a set, which addresses of a service port that lead to the same backends share.
    fn set(&mut self, set: SetImage) -> usize {
        let (own, all) = (self.sets.entry(set.service).or_default(), &mut self.image.sets);
        let known = own.iter().copied().find(|it| all.get(*it) == Some(&set));
        known.unwrap_or_else(|| {
            own.push(all.len());
            all.push(set);
            all.len() - 1
        })
    }
}

/// Which service port it is: the same for the same names, whenever and wherever.
pub(super) fn identity(service: &ServiceName, port: &str, transport: Transport) -> u64 {
    XxHash64::oneshot(0, format!("{service}:{port}/{transport}").as_bytes())
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
