//! The ports of a Service as a backend programs them: where they are reached, and where connections go.
//!
//! Invariant: pure. The rules are those of docs/contract.md, under "Semantics".

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use ipnet::IpNet;

use crate::{
    client::ServiceEndpoints,
    localv1::{IpSet, PortMapping, Protocol, Service, service::SessionAffinity},
};

/// An address family: a backend has tables of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// The family of an address.
    ///
    /// ```
    /// # use proxy_contract::backend::Family;
    /// assert_eq!(Family::of([192, 0, 2, 1].into()), Family::V4);
    /// ```
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

/// A port of a Service in one family, on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedPort {
    /// The name of the port, often empty.
    pub name: String,
    /// The family of its addresses and endpoints.
    pub family: Family,
    /// TCP, UDP or SCTP.
    pub protocol: Protocol,
    /// Where it is reached; each address once.
    pub frontends: Vec<Frontend>,
    /// The endpoints for traffic to a cluster IP, sorted.
    pub internal: Vec<SocketAddr>,
    /// The endpoints for traffic from inside to any other address, sorted.
    pub cluster: Vec<SocketAddr>,
    /// The endpoints for traffic from outside to any other address, sorted.
    pub external: Vec<SocketAddr>,
    /// Endpoints that keep their flows and get no new ones; only with the extension `OtherServing`.
    pub other_serving: Vec<SocketAddr>,
    /// How long a client keeps its endpoint after its last connection, if it keeps one.
    pub affinity: Option<Duration>,
    /// Whether a connection without an endpoint is dropped, since other nodes have endpoints, and not refused.
    pub drops: bool,
    /// Whether traffic from outside keeps its source address: the external policy is Local.
    pub keeps_source: bool,
}

/// Where a port is reached.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Frontend {
    /// The address.
    pub address: FrontendAddress,
    /// The port at this address.
    pub port: u16,
    /// The sources that may use it; all if absent. Packets of others are dropped.
    pub sources: Option<Vec<IpNet>>,
}

/// The address of a [`Frontend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FrontendAddress {
    /// A cluster IP.
    Cluster(IpAddr),
    /// An external or load balancer IP.
    External(IpAddr),
    /// The addresses of the node.
    Node,
}

impl FrontendAddress {
    /// The address, unless it is those of the node.
    pub fn ip(self) -> Option<IpAddr> {
        match self {
            Self::Cluster(it) | Self::External(it) => Some(it),
            Self::Node => None,
        }
    }
}

impl ServedPort {
    /// The endpoints of connections to a frontend of this port, from pods and the node itself (`inside`) or from outside.
    ///
    /// Without any, [`drops`](Self::drops) says what becomes of the connection.
    pub fn endpoints(&self, at: FrontendAddress, inside: bool) -> &[SocketAddr] {
        match (at, inside) {
            (FrontendAddress::Cluster(_), _) => &self.internal,
            (_, true) => &self.cluster,
            (_, false) => &self.external,
        }
    }
}

/// The ports of a Service, by family; those without an address are left out.
///
/// ```
/// use proxy_contract::{
///     backend::{Family, FrontendAddress, ports},
///     client::ServiceEndpoints,
///     localv1::{IpSet, PortMapping, Protocol, Service, ServiceIPs},
/// };
///
/// let cluster_ips = Some(IpSet { v4: vec!["10.96.0.10".into()], v6: vec![] });
/// let port = PortMapping { protocol: Protocol::Udp.into(), port: 53, ..PortMapping::default() };
/// let service = Service {
///     ips: Some(ServiceIPs { cluster_ips, ..ServiceIPs::default() }),
///     ports: vec![port],
///     ..Service::default()
/// };
/// let [dns] = &ports(&ServiceEndpoints { service, ..ServiceEndpoints::default() })[..] else { panic!() };
/// assert_eq!(dns.family, Family::V4);
/// assert_eq!(dns.frontends[0].address, FrontendAddress::Cluster([10, 96, 0, 10].into()));
/// assert!(dns.internal.is_empty() && !dns.drops);
/// ```
pub fn ports(it: &ServiceEndpoints) -> Vec<ServedPort> {
    let indices = 0..it.service.ports.len();
    let all = indices.flat_map(|index| Family::ALL.map(|family| served(it, index, family)));
    all.flatten().collect()
}

fn served(it: &ServiceEndpoints, index: usize, family: Family) -> Option<ServedPort> {
    let service = &it.service;
    let port = &service.ports[index];
    let protocol = Some(port.protocol()).filter(|it| *it != Protocol::UnknownProtocol)?;
    let frontends = frontends(service, port, family);
    if frontends.is_empty() {
        return None;
    }
    let (mut internal, mut cluster, mut external) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for endpoint in it.endpoints.values() {
        let ip = addresses(endpoint.ips.as_ref(), family).next();
        let Some((ip, number)) = ip.zip(endpoint.port(service, index)) else { continue };
        let scopes = endpoint.scopes_at(service, index);
        let of_scope = [
            (&mut internal, scopes.internal),
            (&mut cluster, scopes.cluster.unwrap_or_default()),
            (&mut external, scopes.external),
        ];
        for (set, _) in of_scope.into_iter().filter(|(_, may_serve)| *may_serve) {
            set.insert(SocketAddr::new(ip, number));
        }
    }
    let [internal, cluster, external] = [internal, cluster, external].map(|it| it.into_iter().collect());
    let other_serving = port.other_serving.iter().filter_map(|it| it.parse::<SocketAddr>().ok());
    Some(ServedPort {
        name: port.name.clone(),
        family,
        protocol,
        frontends,
        internal,
        cluster,
        external,
        other_serving: other_serving.filter(|it| Family::of(it.ip()) == family).collect(),
        affinity: service.session_affinity.as_ref().map(|SessionAffinity::ClientIp(it)| {
            Duration::from_secs(u64::try_from(it.timeout_seconds).unwrap_or_default())
        }),
        drops: port.has_any_endpoint.is_some_and(|it| if family == Family::V4 { it.v4 } else { it.v6 }),
        keeps_source: service.external_traffic_to_local,
    })
}

/// Where a port is reached in a family: an address that is both a cluster IP and an external one counts as a cluster IP.
fn frontends(service: &Service, mapping: &PortMapping, family: Family) -> Vec<Frontend> {
    let Some(ips) = &service.ips else { return Vec::new() };
    let conflicting: Vec<IpAddr> = addresses(mapping.conflicting_addresses.as_ref(), family).collect();
    let mut frontends = Vec::new();
    let mut seen = BTreeSet::new();
    let mut add = |address, port: i32, sources| {
        if let Ok(port @ 1..) = u16::try_from(port) {
            frontends.push(Frontend { address, port, sources });
        }
    };
    for ip in addresses(ips.cluster_ips.as_ref(), family) {
        // The port at the node's addresses is its own even if another Service has the cluster IP.
        if seen.is_empty() {
            add(FrontendAddress::Node, mapping.node_port, None);
        }
        if seen.insert(ip) && !conflicting.contains(&ip) {
            add(FrontendAddress::Cluster(ip), mapping.port, None);
        }
    }
    let load_balancer_ips = addresses(ips.load_balancer_ips.as_ref(), family);
    for ip in load_balancer_ips.chain(addresses(ips.external_ips.as_ref(), family)) {
        if seen.insert(ip) && !conflicting.contains(&ip) {
            add(FrontendAddress::External(ip), mapping.port, sources(service, ip));
        }
    }
    frontends
}

/// The sources that may use an address.
fn sources(service: &Service, address: IpAddr) -> Option<Vec<IpNet>> {
    let family = Family::of(address);
    let filters = service.ip_filters.iter();
    let mut filters =
        filters.filter(|it| addresses(it.target_ips.as_ref(), family).any(|it| it == address)).peekable();
    filters.peek()?;
    let ranges = filters.flat_map(|it| &it.source_ranges).filter_map(|it| it.parse::<IpNet>().ok());
    Some(ranges.filter(|it| Family::of(it.addr()) == family).collect())
}

fn addresses(set: Option<&IpSet>, family: Family) -> impl Iterator<Item = IpAddr> {
    let texts = set.into_iter().flat_map(move |it| if family == Family::V4 { &it.v4 } else { &it.v6 });
    texts.filter_map(|it| it.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::localv1::{
        ClientIpAffinity, Endpoint, EndpointScopes, FamilyFlags, IpFilter, PortName, ServiceIPs,
    };

    fn set(addresses: &[&str]) -> Option<IpSet> {
        Some(IpSet::of(addresses))
    }

    fn endpoint(address: &str, scopes: (bool, bool, bool)) -> Arc<Endpoint> {
        let (internal, external, cluster) = scopes;
        let port = PortName { port: 8080, index: Some(0), ..PortName::default() };
        Arc::new(Endpoint {
            ips: set(&[address]),
            port_overrides: vec![port],
            scopes: Some(EndpointScopes { internal, external, cluster: Some(cluster) }),
            ..Endpoint::default()
        })
    }

    fn load_balancer() -> ServiceEndpoints {
        let port = PortMapping {
            protocol: Protocol::Tcp.into(),
            port: 80,
            node_port: 30080,
            has_any_endpoint: Some(FamilyFlags { v4: false, v6: true }),
            ..PortMapping::default()
        };
        let filter = IpFilter {
            target_ips: set(&["192.0.2.1"]),
            source_ranges: vec!["203.0.113.0/24".into(), "junk".into()],
        };
        let service = Service {
            ips: Some(ServiceIPs {
                cluster_ips: set(&["10.96.0.1", "fd00::1"]),
                external_ips: set(&["192.0.2.1", "192.0.2.2", "10.96.0.1"]),
                load_balancer_ips: set(&["192.0.2.1"]),
                ..ServiceIPs::default()
            }),
            ports: vec![port],
            ip_filters: vec![filter],
            session_affinity: Some(SessionAffinity::ClientIp(ClientIpAffinity { timeout_seconds: 60 })),
            ..Service::default()
        };
        let endpoints = [
            ("a".into(), endpoint("10.1.0.2", (true, false, true))),
            ("b".into(), endpoint("10.1.0.1", (true, true, true))),
        ];
        ServiceEndpoints { service, endpoints: endpoints.into() }
    }

    #[test]
    fn a_port_has_its_addresses_and_the_endpoints_of_each_kind_of_traffic() {
        let [v4, v6] = &ports(&load_balancer())[..] else { panic!("one port in two families") };
        let at = |it: &ServedPort| it.frontends.iter().map(|it| (it.address, it.port)).collect::<Vec<_>>();
        let ip = |it: &str| it.parse::<IpAddr>().unwrap();
        assert_eq!(
            at(v4),
            [
                (FrontendAddress::Node, 30080),
                (FrontendAddress::Cluster(ip("10.96.0.1")), 80),
                (FrontendAddress::External(ip("192.0.2.1")), 80),
                (FrontendAddress::External(ip("192.0.2.2")), 80),
            ]
        );
        assert_eq!(at(v6), [(FrontendAddress::Node, 30080), (FrontendAddress::Cluster(ip("fd00::1")), 80)]);
        let endpoints =
            |at, inside| v4.endpoints(at, inside).iter().map(ToString::to_string).collect::<Vec<_>>();
        let both = ["10.1.0.1:8080", "10.1.0.2:8080"];
        assert_eq!(endpoints(v4.frontends[1].address, false), both);
        assert_eq!(endpoints(FrontendAddress::Node, true), both);
        assert_eq!(endpoints(FrontendAddress::Node, false), both[..1]);
        assert!(v6.internal.is_empty() && v6.drops && !v4.drops);
        assert_eq!(v4.affinity, Some(Duration::from_secs(60)));
    }

    #[test]
    fn sources_bind_load_balancer_ips_alone_and_a_range_that_is_none_allows_nothing() {
        let mut it = load_balancer();
        let sources = |it: &ServiceEndpoints| ports(it)[0].frontends[2].sources.clone();
        assert_eq!(sources(&it), Some(vec!["203.0.113.0/24".parse().unwrap()]));
        assert_eq!(ports(&it)[0].frontends[3].sources, None);
        it.service.ip_filters[0].source_ranges = vec!["junk".into()];
        assert_eq!(sources(&it), Some(Vec::new()));
    }

    #[test]
    fn a_conflicting_address_is_left_to_its_owner_and_an_unknown_protocol_is_not_served() {
        let mut it = load_balancer();
        it.service.ports[0].conflicting_addresses = set(&["10.96.0.1", "192.0.2.2"]);
        let left: Vec<_> = ports(&it)[0].frontends.iter().map(|it| it.address).collect();
        assert_eq!(left, [FrontendAddress::Node, FrontendAddress::External([192, 0, 2, 1].into())]);
        it.service.ports[0].protocol = 99;
        assert!(ports(&it).is_empty());
    }
}
