//! Compiles one Service: where it answers packets, and where each of them may go. Pure and total.
//!
//! Which slot an endpoint has is not decided here but in [`super::layout`], which remembers what is where.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use ipnet::IpNet;
use model::{
    Family, Protocol, Rejected,
    state::{Scope, Service, ServicePort, ServiceState, TrafficPolicy},
};

use crate::{
    endpoint_selector::{LONGEST_AFFINITY, Pick},
    rules::Behaviour,
};
use datapath::FrontendKind;

/// Where a Service answers; a node port has the unspecified address of its family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct FrontendAddress {
    /// Its IP address and port.
    pub(super) address: SocketAddr,
    /// Its protocol.
    pub(super) protocol: Protocol,
}

impl FrontendAddress {
    /// The family of its address.
    pub(super) fn family(&self) -> Family {
        Family::of(self.address.ip())
    }
}

impl fmt::Display for FrontendAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.protocol)
    }
}

/// Where packets to a frontend go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// To one of a set of endpoints.
    To(Scope),
    /// Back, with a refusal: nobody serves it.
    Refuse,
    /// Nowhere: somebody serves it, but not here.
    Drop,
}

/// One address of a Service port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Frontend {
    /// The address.
    pub(super) address: FrontendAddress,
    /// Why the Service answers there.
    pub(super) claim: FrontendKind,
    /// What is done with its packets.
    pub(super) behaviour: Behaviour,
    /// Where those from inside go.
    pub(super) inside: Way,
    /// Where those from outside go.
    pub(super) outside: Way,
    /// The sources that may use it, first and last address; only if its behaviour asks for them.
    pub(super) sources: Vec<(IpAddr, IpAddr)>,
}

/// One port of a Service, in one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PortImage {
    /// Its position among the ports of the Service.
    pub(super) index: usize,
    /// What tells it from others: its cluster IP, with protocol and port.
    pub(super) identity: FrontendAddress,
    /// Its addresses, each once; the identity is the first.
    pub(super) frontends: Vec<Frontend>,
    /// Its sets of endpoints, each sorted; of equal ones only the first, unless clients keep their endpoints.
    pub(super) sets: Vec<(Scope, Vec<SocketAddr>)>,
    /// For how many seconds a client keeps its endpoint; 0 if it does not.
    pub(super) affinity: u32,
    /// Where flows may stay that go there, and none may begin.
    pub(super) unselected: Vec<SocketAddr>,
}

impl PortImage {
    /// Where flows may go.
    pub(super) fn allowed(&self) -> BTreeSet<SocketAddr> {
        let selected = self.sets.iter().flat_map(|(_, set)| set);
        selected.chain(&self.unselected).copied().collect()
    }

    /// Whether every flow that had a place to go before may stay there, and none was without one.
    pub(super) fn keeps_flows_of(&self, before: &Self) -> bool {
        let has_endpoints = |it: &Frontend| matches!((it.inside, it.outside), (Way::To(_), Way::To(_)));
        self.identity == before.identity
            && self.frontends == before.frontends
            && self.frontends.iter().all(has_endpoints)
            && self.allowed().is_superset(&before.allowed())
    }
}

/// One Service, compiled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ServiceImage {
    /// Its ports.
    pub(super) ports: Vec<PortImage>,
    /// Its cluster IPs.
    pub(super) cluster_ips: Vec<IpAddr>,
    /// The addresses of its endpoints on this node.
    pub(super) local: BTreeSet<IpAddr>,
    /// What of it is not served.
    pub(super) rejected: Vec<Rejected>,
}

/// The number of a set, from the traffic it was made for.
pub(super) fn set_number(scope: Scope) -> u32 {
    match scope {
        Scope::Cluster => 0,
        Scope::External => 1,
        Scope::Internal => 2,
    }
}

/// Compiles a Service for a node that has these addresses.
pub(super) fn compile(state: &ServiceState, node: &[IpAddr]) -> ServiceImage {
    let mut image = ServiceImage::default();
    let service = &state.service;
    for &ip in &service.cluster_ips {
        if let Some(reason) = unusable(ip) {
            image.reject(service, FrontendKind::ClusterIp, ip, reason);
            continue;
        }
        let family = Family::of(ip);
        image.cluster_ips.push(ip);
        for (index, port) in service.ports.iter().enumerate() {
            // Who has lost its cluster IP to another Service is not served in this family at all.
            if !port.conflicting_addresses.contains(&ip) {
                let port = Port { state, index, port, family, node };
                let compiled = port.compile(ip, &mut image);
                image.ports.push(compiled);
            }
        }
    }
    for endpoint in state.endpoints.iter().filter(|it| it.local) {
        let addresses = endpoint.v4.map(IpAddr::V4).into_iter().chain(endpoint.v6.map(IpAddr::V6));
        image.local.extend(addresses);
    }
    image
}

impl ServiceImage {
    fn reject(&mut self, service: &Service, claim: FrontendKind, what: impl fmt::Display, reason: String) {
        self.rejected.push(Rejected { item: format!("{} {claim} {what}", service.name), reason });
    }
}

/// A port that is being compiled.
#[derive(Clone, Copy)]
struct Port<'a> {
    state: &'a ServiceState,
    index: usize,
    port: &'a ServicePort,
    family: Family,
    node: &'a [IpAddr],
}

impl Port<'_> {
    fn compile(self, cluster_ip: IpAddr, image: &mut ServiceImage) -> PortImage {
        let Service { load_balancer_ips, external_ips, external_policy, affinity, .. } = &*self.state.service;
        let identity = self.at(cluster_ip, self.port.port.get());
        let mut compiled = PortImage {
            index: self.index,
            identity,
            frontends: Vec::new(),
            sets: Vec::new(),
            affinity: affinity.map_or(0, |it| it.timeout_seconds.get().min(LONGEST_AFFINITY)),
            unselected: self.unselected(),
        };
        // The usual case first: sets that are equal to it are not kept twice.
        let mut way = |scope, compiled: &mut PortImage| {
            let (way, beyond) = self.way(scope, compiled);
            if beyond > 0 {
                let reason = format!("{beyond} endpoints too many for session affinity; the others serve it");
                image.reject(&self.state.service, FrontendKind::ClusterIp, identity, reason);
            }
            way
        };
        let cluster = way(Scope::Cluster, &mut compiled);
        let external = match external_policy {
            TrafficPolicy::Cluster => cluster,
            TrafficPolicy::Local => way(Scope::External, &mut compiled),
        };
        let internal = way(Scope::Internal, &mut compiled);
        let is_local = *external_policy == TrafficPolicy::Local;
        let by_policy = |cluster, local| if is_local { local } else { cluster };

        let mut add = |address: FrontendAddress, claim, behaviour, inside, outside, sources| {
            if compiled.frontends.iter().any(|it| it.address == address) {
                let reason = "this Service names the same address and port before; the first one counts";
                image.reject(&self.state.service, claim, address, reason.into());
                return;
            }
            compiled.frontends.push(Frontend { address, claim, behaviour, inside, outside, sources });
        };
        add(identity, FrontendKind::ClusterIp, Behaviour::ClusterIp, internal, internal, Vec::new());
        let reachable = by_policy(Behaviour::External, Behaviour::ExternalLocal);
        let guarded = by_policy(Behaviour::Guarded, Behaviour::GuardedLocal);
        let mut unusable_ips = Vec::new();
        let kinds =
            [(FrontendKind::LoadBalancerIp, load_balancer_ips), (FrontendKind::ExternalIp, external_ips)];
        for (claim, ip) in kinds.into_iter().flat_map(|(claim, ips)| ips.iter().map(move |ip| (claim, *ip))) {
            if Family::of(ip) != self.family || self.port.conflicting_addresses.contains(&ip) {
                continue;
            }
            if let Some(reason) = unusable(ip) {
                unusable_ips.push((claim, ip, reason));
                continue;
            }
            let sources = if claim == FrontendKind::LoadBalancerIp { self.sources(ip) } else { None };
            let behaviour = if sources.is_some() { guarded } else { reachable };
            let address = self.at(ip, self.port.port.get());
            add(address, claim, behaviour, cluster, external, sources.unwrap_or_default());
        }
        if let Some(port) = self.port.node_port {
            let behaviour = by_policy(Behaviour::NodePort, Behaviour::NodePortLocal);
            let address = self.at(unspecified(self.family), port.get());
            add(address, FrontendKind::NodePort, behaviour, cluster, external, Vec::new());
        }
        // Said once for all ports.
        if self.index == 0 {
            for (claim, ip, reason) in unusable_ips {
                image.reject(&self.state.service, claim, ip, reason);
            }
        }
        compiled
    }

    fn unselected(self) -> Vec<SocketAddr> {
        let own = self.state.other_serving.iter().filter(|it| usize::from(it.index) == self.index);
        own.map(|it| it.target).filter(|it| Family::of(it.ip()) == self.family).collect()
    }

    fn at(self, ip: IpAddr, port: u16) -> FrontendAddress {
        FrontendAddress { address: SocketAddr::new(ip, port), protocol: self.port.protocol }
    }

    /// Where traffic of a kind goes, and how many endpoints are too many; the others are kept.
    fn way(self, scope: Scope, compiled: &mut PortImage) -> (Way, usize) {
        let mut set: Vec<_> = self.state.targets(self.index, self.family, scope).collect();
        set.sort_unstable();
        set.dedup();
        if set.is_empty() {
            return (if *self.port.has_any_endpoint.of(self.family) { Way::Drop } else { Way::Refuse }, 0);
        }
        let beyond = set.len().saturating_sub(Pick::most(compiled.affinity));
        set.truncate(set.len() - beyond);
        // Whether a client may keep an endpoint is asked by set: a packet that comes just when two sets become equal, or
        // cease to be, would find that it may not.
        let mut equal = compiled.sets.iter().filter(|_| compiled.affinity == 0);
        let same = equal.find(|(_, it)| *it == set).map(|(same, _)| *same);
        if same.is_none() {
            compiled.sets.push((scope, set));
        }
        (Way::To(same.unwrap_or(scope)), beyond)
    }

    /// The sources that may use a load balancer IP; none if all may.
    fn sources(self, ip: IpAddr) -> Option<Vec<(IpAddr, IpAddr)>> {
        let all = &self.state.service.source_ranges;
        let own: Vec<_> = all.iter().filter(|it| Family::of(it.addr()) == self.family).copied().collect();
        if own.is_empty() || own.iter().any(|it| it.prefix_len() == 0) {
            return None;
        }
        // What overlaps is one range; the kernel wants each address in one only.
        let nets = IpNet::aggregate(&own);
        let mut sources: Vec<_> = nets.iter().map(|it| (it.network(), it.broadcast())).collect();
        // Where the host has the load balancer's address as its own, it is what the host itself comes from.
        if self.node.iter().any(|it| nets.iter().any(|net| net.contains(it)))
            && !nets.iter().any(|net| net.contains(&ip))
        {
            sources.push((ip, ip));
        }
        Some(sources)
    }
}

/// The unspecified address: what a node port has instead of one.
pub(super) fn unspecified(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Why no packet may be translated for this address, if so.
fn unusable(ip: IpAddr) -> Option<String> {
    let what = match ip {
        _ if ip.is_unspecified() => "the unspecified address",
        _ if ip.is_loopback() => "a loopback address",
        _ if ip.is_multicast() => "a multicast address",
        IpAddr::V6(it) if it.to_ipv4_mapped().is_some() => "a v4-mapped address",
        _ => return None,
    };
    Some(format!("{what} cannot be a Service's; give it one from the service CIDR"))
}
