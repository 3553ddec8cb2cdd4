//! The frontend of a destination, as the cluster knows it.

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    sync::Arc,
};

use model::{
    Family, FrontendKind, Protocol, ServiceName,
    cluster::{ClusterState, Service},
    conflicts::{FrontendKey, remove_conflicting},
    state::{ServiceKind, ServicePort, TrafficPolicy},
};

use super::{
    client,
    explanation::{ClientKind, Verdict},
    query::{Destination, InvalidQuery, did_you_mean},
};
use crate::{
    Options,
    admission::Admission,
    frontends::{frontends, has_family},
};

#[derive(Clone, Copy, Debug)]
pub(super) struct Search<'a> {
    pub(super) cluster: &'a ClusterState,
    pub(super) admission: &'a Admission,
    pub(super) options: &'a Options,
    pub(super) node: &'a str,
    pub(super) client: ClientKind,
    /// The client's addresses, as far as they are known.
    pub(super) client_addresses: &'a [IpAddr],
}

#[derive(Debug)]
pub(super) struct Frontend<'a> {
    pub(super) service: &'a Service,
    /// The Service without the frontends that another one owns.
    pub(super) state: Service,
    /// The position of its port.
    pub(super) port: usize,
    pub(super) kind: FrontendKind,
    /// Where the node port is, if it is one.
    pub(super) node: Option<NodeAddress<'a>>,
}

/// Whose address the destination is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeAddress<'a> {
    Own,
    Loopback,
    Other(&'a str),
    /// One that no Node object has; taken for one of this node.
    Unknown,
}

/// An address at which no connection is redirected: what becomes of it, and why.
pub(super) type Unmatched = (Verdict, String);

impl<'a> Search<'a> {
    pub(super) fn address(&self, destination: &Destination) -> Result<(SocketAddr, Protocol), InvalidQuery> {
        let (name, port, protocol) = match destination {
            Destination::Address(address, protocol) => {
                let all = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];
                let protocol = protocol
                    .or_else(|| all.into_iter().find(|it| self.frontend(*address, *it).is_ok()))
                    .or_else(|| all.into_iter().find(|it| self.is_claimed(*address, *it)))
                    .unwrap_or(Protocol::Tcp);
                return Ok((*address, protocol));
            }
            Destination::Service(name, port, protocol) => (name, port.as_deref(), *protocol),
        };
        let service = self.service(name)?;
        let state = self.state(service).ok_or_else(|| self.unserved(service))?;
        let is_meant = |it: &&ServicePort| {
            protocol.is_none_or(|protocol| it.protocol == protocol)
                && port.is_none_or(|port| it.name == port || it.port.to_string() == port)
        };
        let port = match &state.ports.iter().filter(is_meant).collect::<Vec<_>>()[..] {
            [] => Err("has no such port"),
            [port] => Ok(*port),
            // As DNS and telnet, one on two protocols.
            [first, ..] if port.is_some() => Ok(*first),
            _ => Err("has several ports; name one"),
        };
        let port = port.map_err(|what| InvalidQuery(format!("Service {name} {what}: {}", ports(&state))))?;
        let own = |ips: &[IpAddr], number: NonZeroU16| {
            let own = ips.iter().filter(|it| !port.conflicting_addresses.contains(it));
            own.map(|it| SocketAddr::new(*it, number.get())).collect::<Vec<_>>()
        };
        let cluster_ips = own(&state.cluster_ips, port.port);
        let external =
            [own(&state.load_balancer_ips, port.port), own(&state.external_ips, port.port)].concat();
        let addresses = client::node_addresses(self.cluster, self.node).iter().copied();
        let addresses: Vec<_> = addresses.filter(|it| has_family(service, Family::of(*it))).collect();
        let node_port = port.node_port.map(|it| own(&addresses, it)).unwrap_or_default();
        let own = match self.client {
            ClientKind::Outside => {
                let reachable = [external, node_port].concat();
                if reachable.is_empty() { cluster_ips } else { reachable }
            }
            ClientKind::Node | ClientKind::Pod => [cluster_ips, external, node_port].concat(),
        };
        // Without any of its own, it has lost its cluster IP, too.
        let lost = || Some(SocketAddr::new(*state.cluster_ips.first()?, port.port.get()));
        let has_its_family = |it: &&SocketAddr| {
            self.client_addresses.iter().any(|client| Family::of(*client) == Family::of(it.ip()))
        };
        let address = own.iter().find(has_its_family).or(own.first()).copied().or_else(lost);
        Ok((address.ok_or_else(|| self.unserved(service))?, port.protocol))
    }

    /// Whether a Service has the address, or the node port.
    fn is_claimed(&self, address: SocketAddr, protocol: Protocol) -> bool {
        NonZeroU16::new(address.port()).is_some_and(|port| {
            [Some(address.ip()), None].into_iter().any(|address| {
                self.admission.owners.claimants(FrontendKey { address, port, protocol }).next().is_some()
            })
        })
    }

    /// The frontend at an address; or why a connection to it is not redirected.
    pub(super) fn frontend(
        &self,
        address: SocketAddr,
        protocol: Protocol,
    ) -> Result<Frontend<'a>, Unmatched> {
        let at = |ip| {
            let port = NonZeroU16::new(address.port())?;
            let name = self.admission.owners.claimants(FrontendKey { address: ip, port, protocol }).next()?;
            let service = self.cluster.services.get(name)?;
            let state = self.state(service)?;
            let is_own = |it: &ServicePort| {
                it.protocol == protocol
                    && if ip.is_some() { it.port == port } else { it.node_port == Some(port) }
            };
            let port = state.ports.iter().position(is_own)?;
            Some(Frontend { service, port, kind: FrontendKind::NodePort, node: None, state })
        };
        if let Some(mut frontend) = at(Some(address.ip())) {
            frontend.kind = kind_of(&frontend.state, address.ip()).unwrap_or(FrontendKind::ClusterIp);
            return Ok(frontend);
        }
        let (Some(frontend), Some(node)) = (at(None), self.node_address(address.ip())) else {
            return Err(self.unmatched(address, protocol));
        };
        self.node_port(frontend, node, address, protocol)
    }

    /// The frontend, if the node port is served at this address for this client.
    fn node_port(
        &self,
        frontend: Frontend<'a>,
        node: NodeAddress<'a>,
        address: SocketAddr,
        protocol: Protocol,
    ) -> Result<Frontend<'a>, Unmatched> {
        let ip = address.ip();
        // No hook sees it.
        let is_packet = self.client == ClientKind::Outside || protocol == Protocol::Sctp;
        let untranslated = |reason| Err((Verdict::Untranslated, reason));
        if !has_family(frontend.service, Family::of(ip)) {
            let name = &frontend.service.name;
            return untranslated(format!(
                "{name} has no cluster IP of this family, and so no node port in it"
            ));
        }
        match node {
            NodeAddress::Loopback if self.client != ClientKind::Node => {
                untranslated(format!("{ip} is the loopback address of the client itself"))
            }
            NodeAddress::Loopback if is_packet => {
                untranslated(format!("{protocol} is translated as packets, and packets to {ip} are not"))
            }
            NodeAddress::Other(other) if is_packet => {
                untranslated(format!("{ip} is an address of node {other}, which decides: ask there"))
            }
            NodeAddress::Other(other) if frontend.service.external_policy == TrafficPolicy::Local => {
                untranslated(format!(
                    "{ip} is an address of node {other}, which decides, because externalTrafficPolicy is Local"
                ))
            }
            node => Ok(Frontend { node: Some(node), ..frontend }),
        }
    }

    /// Whose address this is, if it may be a node's.
    fn node_address(&self, ip: IpAddr) -> Option<NodeAddress<'a>> {
        let has = |name: &str| self.cluster.nodes.get(name).is_some_and(|it| it.info.addresses.contains(&ip));
        let other = || self.cluster.nodes.values().find(|it| it.info.addresses.contains(&ip));
        Some(match () {
            () if ip.is_loopback() => NodeAddress::Loopback,
            () if has(self.node) => NodeAddress::Own,
            () if let Some(other) = other() => NodeAddress::Other(&other.name),
            () if self.at_address(ip).is_some() => return None,
            () => NodeAddress::Unknown,
        })
    }

    /// Why a connection to an address that is no frontend's is not redirected, and what becomes of it.
    fn unmatched(&self, address: SocketAddr, protocol: Protocol) -> Unmatched {
        if let Some(known) = self.at_address(address.ip()) {
            return known;
        }
        let name = format!("{address}/{protocol}");
        let frontends = self.admission.owners.owned();
        let frontends =
            frontends.filter(|(it, owner)| it.address.is_some() && !self.admission.is_refused(owner));
        let near = did_you_mean(&name, frontends.map(|(key, service)| format!("{key} ({service})")));
        let what = match self.node_address(address.ip()) {
            Some(NodeAddress::Unknown) | None => format!("no Service has the address {}", address.ip()),
            Some(_) => format!("no Service has the node port {}/{protocol}", address.port()),
        };
        (Verdict::Untranslated, format!("{what}{near}"))
    }

    /// What an address is, other than a node's, and what becomes of a connection to a port there that no Service has.
    fn at_address(&self, ip: IpAddr) -> Option<Unmatched> {
        let services = || self.cluster.services.values();
        let untranslated = |reason| Some((Verdict::Untranslated, reason));
        let is_unserved = |it: &&Arc<Service>| it.cluster_ips.contains(&ip) && self.state(it).is_none();
        if let Some(service) = services().find(is_unserved) {
            return untranslated(self.unserved(service).to_string());
        }
        let served = services().find_map(|it| {
            let state = self.state(it)?;
            Some((kind_of(&state, ip)?, state))
        });
        if let Some((kind, state)) = served {
            // nftables rejects packets to other ports of a cluster IP.
            let verdict =
                if kind == FrontendKind::ClusterIp { Verdict::Refused } else { Verdict::Untranslated };
            let name = &state.name;
            return Some((
                verdict,
                format!("{ip} is a {kind} of {name}, which has no such port: {}", ports(&state)),
            ));
        }
        let cidrs = &self.cluster.service_cidrs;
        if let Some(it) = cidrs.values().find(|it| it.cidrs.iter().any(|it| it.contains(&ip))) {
            let reason = format!("{ip} is in the ServiceCIDR {}, and no Service has it", it.name);
            return Some((Verdict::Dropped, reason));
        }
        let slice = self.cluster.slices().find(|it| it.endpoints.iter().any(|it| it.address == ip))?;
        untranslated(format!("{ip} is an endpoint of {}, and no frontend", slice.service))
    }

    fn service(&self, name: &ServiceName) -> Result<&'a Service, InvalidQuery> {
        let unknown = || {
            let hint = did_you_mean(&name.to_string(), self.cluster.services.keys());
            InvalidQuery(format!("there is no Service {name}{hint}"))
        };
        self.cluster.services.get(name).map(|it| &**it).ok_or_else(unknown)
    }

    /// A Service as it is served, without endpoints; none if it is not served.
    fn state(&self, service: &Service) -> Option<Service> {
        if self.admission.is_refused(&service.name) {
            return None;
        }
        let mut state = frontends(service, self.options)?;
        if let Some(conflicting) = self.admission.admitted(&service.name).conflicting {
            remove_conflicting(&mut state, conflicting);
        }
        Some(state)
    }

    fn unserved(&self, service: &Service) -> InvalidQuery {
        let reason = match (service.kind, &service.proxy_name) {
            (ServiceKind::ExternalName, _) => {
                "is of type ExternalName: a DNS entry, which is not proxied".to_owned()
            }
            (_, name) if *name != self.options.service_proxy_name => format!(
                "is served by the proxy {:?} (label service.kubernetes.io/service-proxy-name), and this is {:?}",
                name.as_deref().unwrap_or_default(),
                self.options.service_proxy_name.as_deref().unwrap_or_default()
            ),
            _ if self.admission.is_refused(&service.name) => {
                "does not fit into its namespace, which has too many endpoints and ports; `status` says how many".to_owned()
            }
            _ => "has no cluster IP: its clients connect to its endpoints, which DNS names".to_owned(),
        };
        InvalidQuery(format!("Service {} {reason}", service.name))
    }
}

/// Why a Service has an address; the first reason if there are several.
fn kind_of(state: &Service, ip: IpAddr) -> Option<FrontendKind> {
    let lists = [
        (FrontendKind::ClusterIp, &state.cluster_ips),
        (FrontendKind::LoadBalancerIp, &state.load_balancer_ips),
        (FrontendKind::ExternalIp, &state.external_ips),
    ];
    lists.into_iter().find(|(_, ips)| ips.contains(&ip)).map(|(kind, _)| kind)
}

/// The ports of a Service, such as `80/TCP (http), 443/TCP (https)`.
fn ports(state: &Service) -> String {
    let port = |it: &ServicePort| {
        let name = if it.name.is_empty() { String::new() } else { format!(" ({})", it.name) };
        format!("{}/{}{name}", it.port, it.protocol)
    };
    let ports: Vec<_> = state.ports.iter().map(port).collect();
    if ports.is_empty() { "it has none".into() } else { format!("it has {}", ports.join(", ")) }
}
