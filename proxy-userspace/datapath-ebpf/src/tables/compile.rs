//! Compiles one Service: its frontends and the backends of each. Pure and total.
//!
//! The ids and positions of backend sets are assigned in [`crate::tables::layout`].

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use datapath::{FrontendAddress, invalid_address_reason, unspecified};
use model::{
    Family, FrontendKind, Protocol, Rejected, ServiceName,
    state::{Algorithm, PassiveHealth, Scope, ServicePort, ServiceState, TrafficPolicy},
};
use proxy_common::tables::FrontendOptions;
use twox_hash::XxHash64;

/// Whether a protocol is translated at socket level. No hook sees SCTP sockets; the packet path translates SCTP.
pub(crate) fn is_translated(protocol: Protocol) -> bool {
    protocol != Protocol::Sctp
}

/// One address of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frontend {
    pub(crate) address: FrontendAddress,
    /// The position of its port in the Service.
    pub(crate) port: usize,
    /// The position of its set in [`ServiceImage::sets`].
    pub(crate) set: usize,
    /// Seconds after its last connection for which a client keeps its backend; 0 for no affinity.
    pub(crate) affinity: u32,
    /// The id of the service port, see [`port_id`].
    pub(crate) port_id: u64,
    pub(crate) health: PassiveHealth,
    pub(crate) options: FrontendOptions,
}

impl Frontend {
    /// The traffic for which its backends are selected.
    pub(crate) fn scope(&self) -> Scope {
        if self.options.is_external() { Scope::Cluster } else { Scope::Internal }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ServiceImage {
    /// Its frontends, each address once.
    pub(crate) frontends: Vec<Frontend>,
    pub(crate) sets: Vec<SetImage>,
    pub(crate) rejected: Vec<Rejected>,
    /// Its cluster IPs that are on an interface of the host, and so have no frontends.
    pub(crate) left_to_host: Vec<IpAddr>,
    /// Its load balancer IPs with source ranges, at each port: only packets are translated there.
    pub(crate) packets_only: Vec<FrontendAddress>,
}

/// The backends of some frontends of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SetImage {
    /// The service port; connections are counted per service port and backend.
    pub(crate) port_id: u64,
    pub(crate) family: Family,
    /// Whether its backends are in the members table, because clients return to them: with UDP and with affinity.
    pub(crate) has_members: bool,
    /// The backends, sorted, each once.
    pub(crate) backends: Vec<SocketAddr>,
    /// Whether no two endpoints have the same backend.
    pub(crate) is_unique: bool,
}

/// Compiles a Service: its cluster IPs with the endpoints for internal traffic; its node ports, external and load balancer
/// IPs with those for traffic from inside the cluster, because every local socket is inside.
///
/// A frontend with an empty set refuses connections, also where an endpoint on another node could serve them (internal
/// policy Local): a socket cannot be handed to another node, and an immediate error is better than a timeout.
///
/// A cluster IP among `host_addresses` is left to the host, where a program may serve it instead, as NodeLocal DNSCache does;
/// packets that are tracked are translated by the packet path all the same.
pub(crate) fn compile(state: &ServiceState, host_addresses: &BTreeSet<IpAddr>) -> ServiceImage {
    let service = &state.service;
    let mut compiler =
        Compiler { state, image: ServiceImage::default(), addresses: HashSet::new(), sets: HashMap::new() };
    for &ip in &service.cluster_ips {
        if host_addresses.contains(&ip) {
            compiler.image.left_to_host.push(ip);
        } else {
            compiler.add(ip, FrontendKind::ClusterIp);
        }
    }
    // Source ranges apply to the source address, which a socket has only after routing: the packet path checks them. So it does
    // where an address is an external IP, too.
    let is_restricted = |ip: &IpAddr| {
        let family = Family::of(*ip);
        let mut ranges = service.source_ranges.iter().filter(|it| Family::of(it.addr()) == family).peekable();
        // A range of everyone restricts nothing.
        let has_ranges = ranges.peek().is_some() && ranges.all(|it| it.prefix_len() > 0);
        has_ranges && service.load_balancer_ips.contains(ip)
    };
    for (kind, ips) in [
        (FrontendKind::LoadBalancerIp, &service.load_balancer_ips),
        (FrontendKind::ExternalIp, &service.external_ips),
    ] {
        ips.iter().filter(|it| !is_restricted(it)).for_each(|it| compiler.add(*it, kind));
    }
    for &ip in service.load_balancer_ips.iter().filter(|it| is_restricted(it)) {
        let ports = service.ports.iter().filter(|it| !it.conflicting_addresses.contains(&ip));
        let at = ports
            .map(|it| FrontendAddress { address: SocketAddr::new(ip, it.port.get()), protocol: it.protocol });
        compiler.image.packets_only.extend(at);
    }
    for &ip in &service.cluster_ips {
        compiler.add_node_ports(unspecified(Family::of(ip)));
    }
    compiler.image
}

struct Compiler<'a> {
    state: &'a ServiceState,
    image: ServiceImage,
    /// The addresses of the frontends in the image.
    addresses: HashSet<FrontendAddress>,
    /// The positions of the sets of a service port.
    sets: HashMap<u64, Vec<usize>>,
}

impl Compiler<'_> {
    /// Adds every port of the Service at one of its addresses.
    fn add(&mut self, ip: IpAddr, kind: FrontendKind) {
        let service = &self.state.service;
        if let Some(reason) = invalid_address_reason(ip) {
            self.image.rejected.push(Rejected::not_served(format!("{} {kind} {ip}", service.name), reason));
            return;
        }
        for (index, port) in service.ports.iter().enumerate() {
            if !port.conflicting_addresses.contains(&ip) {
                self.add_port((index, port), SocketAddr::new(ip, port.port.get()), kind);
            }
        }
    }

    /// Adds the node ports of the family of `unspecified`.
    fn add_node_ports(&mut self, unspecified: IpAddr) {
        for (index, port) in self.state.service.ports.iter().enumerate() {
            if let Some(number) = port.node_port.map(NonZeroU16::get) {
                self.add_port((index, port), SocketAddr::new(unspecified, number), FrontendKind::NodePort);
            }
        }
    }

    fn add_port(&mut self, (index, port): (usize, &ServicePort), address: SocketAddr, kind: FrontendKind) {
        let service = &self.state.service;
        let protocol = port.protocol;
        if !is_translated(protocol) {
            return;
        }
        let address = FrontendAddress { address, protocol };
        if !self.addresses.insert(address) {
            self.image.rejected.push(Rejected::not_served(
                format!("{} {kind} {address}", service.name),
                "this Service lists the same address and port twice; the first one is used",
            ));
            return;
        }
        let family = address.family();
        let scope = if kind == FrontendKind::ClusterIp { Scope::Internal } else { Scope::Cluster };
        let mut backends = Vec::with_capacity(self.state.endpoints.len());
        backends.extend(self.state.targets(index, family, scope));
        let targets = backends.len();
        backends.sort_unstable();
        backends.dedup();
        let is_unique = backends.len() == targets;
        let affinity = service.affinity.map_or(0, |it| it.timeout_seconds.get());
        let has_members = protocol == Protocol::Udp || affinity != 0;
        let port_id = port_id(&service.name, &port.name, protocol);
        let set = self.set(SetImage { port_id, family, has_members, backends, is_unique });
        let local_addresses_only =
            kind == FrontendKind::NodePort && service.external_policy == TrafficPolicy::Local;
        let balancing = &service.load_balancing;
        let options = FrontendOptions::new(
            local_addresses_only,
            balancing.algorithm == Algorithm::LeastConnections,
            balancing.slow_start.map_or(0, NonZeroU16::get),
        );
        let options = if kind == FrontendKind::ClusterIp { options } else { options.external() };
        let is_left = balancing.udp_to_packets && protocol == Protocol::Udp;
        let options = if is_left { options.to_packets() } else { options };
        let health = match protocol {
            Protocol::Tcp => balancing.passive_health,
            // Nothing tells whether a datagram was answered.
            _ => PassiveHealth { enabled: Some(false), ..PassiveHealth::default() },
        };
        self.image.frontends.push(Frontend { address, port: index, set, affinity, port_id, health, options });
    }

    /// The position of a set; frontends of a service port with equal backends share one.
    fn set(&mut self, set: SetImage) -> usize {
        let (own, all) = (self.sets.entry(set.port_id).or_default(), &mut self.image.sets);
        let equal = own.iter().copied().find(|it| all.get(*it) == Some(&set));
        equal.unwrap_or_else(|| {
            own.push(all.len());
            all.push(set);
            all.len() - 1
        })
    }
}

/// Identifies a service port by a hash of its names: the same in every generation, after every restart, on every node.
pub(crate) fn port_id(service: &ServiceName, port: &str, protocol: Protocol) -> u64 {
    XxHash64::oneshot(0, format!("{service}:{port}/{protocol}").as_bytes())
}
