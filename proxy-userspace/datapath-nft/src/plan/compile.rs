//! Compiles one Service: its frontends, and where packets to each of them go. Pure and total.
//!
//! [`layout`](crate::plan::layout) assigns slots to endpoints, since it knows the previous ones.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use model::{
    Family, FrontendKind, Protocol, Rejected, ServiceName,
    state::{ForwardedPort, PortTarget, Scope, Service, ServicePort, ServiceState, TrafficPolicy},
};

use crate::plan::{
    endpoint_selector::{MAX_AFFINITY_SECONDS, Selector},
    rules::FrontendPolicy,
    source_list::SourceList,
};
use datapath::{AvoidedEndpoint, FrontendAddress, invalid_address_reason, unspecified};

/// Where packets to a frontend go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// To one of a set of endpoints.
    To(Scope),
    /// Rejected: the Service has no endpoint.
    Refuse,
    /// Dropped: the Service has endpoints, but none that the policy allows here.
    Drop,
}

/// One address of a Service port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frontend {
    pub(crate) address: FrontendAddress,
    pub(crate) policy: FrontendPolicy,
    /// Where traffic from pods and this node goes.
    pub(crate) internal: Action,
    /// Where traffic from elsewhere goes; of a forwarded frontend, where the packets go that other nodes forward to this one.
    pub(crate) external: Action,
    /// Whether other nodes forward its packets to this one, which has endpoints for them.
    pub(crate) is_forwarded: bool,
    /// The allowed sources, if its policy checks them.
    pub(crate) sources: Option<Arc<SourceList>>,
}

impl Frontend {
    /// Whether it leads from outside to an endpoint.
    pub(crate) fn is_counted(&self) -> bool {
        self.policy != FrontendPolicy::ClusterIp && matches!(self.external, Action::To(_))
    }

    /// Whether any of its traffic goes to the endpoints of a scope.
    pub(crate) fn uses(&self, scope: Scope) -> bool {
        [self.internal, self.external].contains(&Action::To(scope))
    }
}

/// The name of the counter of a port's connections from outside, which `nft` can read; none if the kernel would not take it.
pub(crate) fn counter_name(service: &ServiceName, port: &ServicePort) -> Option<String> {
    /// The longest, with its zero byte (`NFT_OBJ_MAXNAMELEN`).
    const MAX: usize = 256;
    let name = format!("external/{service}/{}/{}", port.name, port.protocol);
    (name.len() < MAX).then_some(name)
}

/// One port of a Service, in one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PortImage {
    /// Its position among the ports of the Service.
    pub(crate) index: usize,
    /// Its identity: the cluster IP with protocol and port, or another address of its own if that belongs to another Service. Where
    /// the cluster IP comes or goes, it is a new port, whose clients choose again.
    pub(crate) identity: FrontendAddress,
    /// Whether nodes forward its packets, to this node or to others.
    pub(crate) is_forwarded: bool,
    /// The name of the counter of its connections from outside; none if no frontend leads from there to an endpoint.
    pub(crate) counter: Option<Arc<str>>,
    /// Its addresses, each once; the identity is the first.
    pub(crate) frontends: Vec<Frontend>,
    /// Its endpoint sets, each sorted; of equal ones only the first, unless there is session affinity.
    pub(crate) sets: Vec<(Scope, Arc<[SocketAddr]>)>,
    /// The set of each scope: one of `sets`, or none if it has no endpoint.
    pub(crate) scopes: Vec<(Scope, Option<Scope>)>,
    /// Whether no two endpoints have the same address and port in a set.
    pub(crate) is_unique: bool,
    /// The timeout of session affinity in seconds; 0 without affinity.
    pub(crate) affinity: u32,
    /// Endpoints that keep existing flows but get no new ones.
    pub(crate) unselected: Vec<SocketAddr>,
    /// Endpoints that are there and get no flows.
    pub(crate) not_serving: Vec<SocketAddr>,
}

impl PortImage {
    /// The endpoints that flows may lead to, some of them more than once.
    pub(crate) fn endpoints(&self) -> impl Iterator<Item = &SocketAddr> {
        self.sets.iter().flat_map(|(_, set)| &**set).chain(&self.unselected)
    }

    pub(crate) fn allowed(&self) -> BTreeSet<SocketAddr> {
        self.endpoints().copied().collect()
    }

    pub(crate) fn allows(&self, endpoint: &SocketAddr) -> bool {
        let is_selected = self.sets.iter().any(|(_, set)| set.binary_search(endpoint).is_ok());
        is_selected || self.unselected.contains(endpoint)
    }

    /// Whether every existing flow may stay where it is, and none was rejected or dropped before.
    pub(crate) fn keeps_flows_of(&self, before: &Self) -> bool {
        let has_endpoints =
            |it: &Frontend| matches!((it.internal, it.external), (Action::To(_), Action::To(_)));
        self.identity == before.identity
            && self.frontends == before.frontends
            && self.frontends.iter().all(has_endpoints)
            && self.allowed().is_superset(&before.allowed())
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ServiceImage {
    pub(crate) ports: Vec<PortImage>,
    pub(crate) cluster_ips: Vec<IpAddr>,
    /// The addresses of its endpoints on this node.
    pub(crate) local: BTreeSet<IpAddr>,
    /// What of it is not served, and why.
    pub(crate) rejected: Vec<Rejected>,
}

/// The number of the endpoint set for a scope.
pub(crate) fn set_number(scope: Scope) -> u32 {
    match scope {
        Scope::Cluster => 0,
        Scope::External => 1,
        Scope::Internal => 2,
    }
}

/// Compiles a Service for a node with these addresses, whose packets avoid some endpoints.
pub(crate) fn compile(
    state: &ServiceState,
    node: &[IpAddr],
    avoided: &BTreeSet<AvoidedEndpoint>,
) -> ServiceImage {
    let mut image = ServiceImage::default();
    let service = &state.service;
    for &ip in &service.cluster_ips {
        if let Some(reason) = invalid_address_reason(ip) {
            image.reject(service, FrontendKind::ClusterIp, ip, reason);
            continue;
        }
        let family = Family::of(ip);
        let mut sources = SourceRanges::new(service, node, family);
        image.cluster_ips.push(ip);
        for (index, port) in service.ports.iter().enumerate() {
            let port = Port { state, index, port, family, avoided };
            let compiled = port.compile(ip, &mut sources, &mut image);
            image.ports.extend(compiled);
        }
    }
    for endpoint in state.endpoints.iter().filter(|it| it.local) {
        let addresses = endpoint.v4.map(IpAddr::V4).into_iter().chain(endpoint.v6.map(IpAddr::V6));
        image.local.extend(addresses);
    }
    image.shrink_to_fit();
    image
}

impl ServiceImage {
    /// It is kept for long, and there are many.
    fn shrink_to_fit(&mut self) {
        self.ports.shrink_to_fit();
        self.cluster_ips.shrink_to_fit();
        for port in &mut self.ports {
            port.frontends.shrink_to_fit();
            port.scopes.shrink_to_fit();
            port.sets.shrink_to_fit();
        }
    }

    fn reject(&mut self, service: &Service, kind: FrontendKind, what: impl fmt::Display, reason: String) {
        self.rejected.push(Rejected::not_served(format!("{} {kind} {what}", service.name), reason));
    }
}

/// A port that is being compiled.
#[derive(Clone, Copy)]
struct Port<'a> {
    state: &'a ServiceState,
    index: usize,
    port: &'a ServicePort,
    family: Family,
    avoided: &'a BTreeSet<AvoidedEndpoint>,
}

/// The source ranges of a Service in a family, merged once for all of its ports.
struct SourceRanges {
    list: Arc<SourceList>,
    /// Whether an address of this node is among them.
    includes_node: bool,
    /// With a load balancer IP that is not among them, if this node is.
    with: BTreeMap<IpAddr, Arc<SourceList>>,
}

impl SourceRanges {
    /// `None` if every source is allowed.
    fn new(service: &Service, node: &[IpAddr], family: Family) -> Option<Self> {
        let own = service.source_ranges.iter().filter(|it| Family::of(it.addr()) == family);
        let own: Vec<_> = own.copied().collect();
        if own.is_empty() || own.iter().any(|it| it.prefix_len() == 0) {
            return None;
        }
        let list = Arc::new(SourceList::new(own));
        let includes_node = node.iter().any(|it| Family::of(*it) == family && list.contains(*it));
        Some(Self { list, includes_node, with: BTreeMap::new() })
    }

    /// The allowed sources of a load balancer IP.
    fn of(&mut self, ip: IpAddr) -> Arc<SourceList> {
        // If the load balancer's address is assigned to the host, the host's own traffic has it as source.
        if self.includes_node && !self.list.contains(ip) {
            return Arc::clone(self.with.entry(ip).or_insert_with(|| Arc::new(self.list.with(ip))));
        }
        Arc::clone(&self.list)
    }
}

impl<'a> Port<'a> {
    /// `None` if all of its addresses belong to other Services.
    fn compile(
        self,
        cluster_ip: IpAddr,
        source_ranges: &mut Option<SourceRanges>,
        image: &mut ServiceImage,
    ) -> Option<PortImage> {
        let Service { load_balancer_ips, external_ips, external_policy, affinity, .. } = &*self.state.service;
        let at_cluster_ip = self.at(cluster_ip, self.port.port.get());
        let mut compiled = PortImage {
            index: self.index,
            identity: at_cluster_ip,
            is_forwarded: self.forwarded().is_some(),
            counter: None,
            frontends: Vec::new(),
            sets: Vec::new(),
            scopes: Vec::new(),
            is_unique: true,
            affinity: affinity.map_or(0, |it| it.timeout_seconds.get().min(MAX_AFFINITY_SECONDS)),
            unselected: self.own(&self.state.other_serving),
            not_serving: self.own(&self.state.not_serving),
        };
        // The common case first; equal sets are stored once.
        let cluster = self.way(Scope::Cluster, &mut compiled, image);
        let external = match external_policy {
            TrafficPolicy::Cluster => cluster,
            TrafficPolicy::Local => self.way(Scope::External, &mut compiled, image),
        };
        let here = self.forwarded().filter(|it| !it.targets.is_empty());
        let forwarded = here.map(|_| self.way(Scope::External, &mut compiled, image));
        let internal = self.way(Scope::Internal, &mut compiled, image);
        let is_local = *external_policy == TrafficPolicy::Local;
        let by_policy = |cluster, local| if is_local { local } else { cluster };

        let mut add = |kind, frontend: Frontend| {
            if compiled.frontends.iter().any(|it| it.address == frontend.address) {
                let reason = "this Service lists the same address and port twice; the first one is used";
                image.reject(&self.state.service, kind, frontend.address, reason.into());
                return;
            }
            compiled.frontends.push(frontend);
        };
        let frontend = |address, policy, internal, external| Frontend {
            address,
            policy,
            internal,
            external,
            is_forwarded: false,
            sources: None,
        };
        if !self.port.conflicting_addresses.contains(&cluster_ip) {
            let policy = FrontendPolicy::ClusterIp;
            add(FrontendKind::ClusterIp, frontend(at_cluster_ip, policy, internal, internal));
        }
        let reachable = by_policy(FrontendPolicy::External, FrontendPolicy::ExternalLocal);
        let restricted = by_policy(FrontendPolicy::SourceRanges, FrontendPolicy::SourceRangesLocal);
        let mut unusable_ips = Vec::new();
        let kinds =
            [(FrontendKind::LoadBalancerIp, load_balancer_ips), (FrontendKind::ExternalIp, external_ips)];
        for (kind, ip) in kinds.into_iter().flat_map(|(kind, ips)| ips.iter().map(move |ip| (kind, *ip))) {
            if Family::of(ip) != self.family || self.port.conflicting_addresses.contains(&ip) {
                continue;
            }
            if let Some(reason) = invalid_address_reason(ip) {
                unusable_ips.push((kind, ip, reason));
                continue;
            }
            let own_ranges = source_ranges.as_mut().filter(|_| kind == FrontendKind::LoadBalancerIp);
            let sources = own_ranges.map(|it| it.of(ip));
            let policy = if sources.is_some() { restricted } else { reachable };
            let address = self.at(ip, self.port.port.get());
            let own = frontend(address, policy, cluster, forwarded.unwrap_or(external));
            add(kind, Frontend { is_forwarded: forwarded.is_some(), sources, ..own });
        }
        if let Some(port) = self.port.node_port {
            let policy = by_policy(FrontendPolicy::NodePort, FrontendPolicy::NodePortLocal);
            let address = self.at(unspecified(self.family), port.get());
            add(FrontendKind::NodePort, frontend(address, policy, cluster, external));
        }
        // Reported once for all ports.
        if self.index == 0 {
            for (kind, ip, reason) in unusable_ips {
                image.reject(&self.state.service, kind, ip, reason);
            }
        }
        compiled.identity = compiled.frontends.first()?.address;
        if compiled.frontends.iter().any(Frontend::is_counted) {
            compiled.counter = counter_name(&self.state.service.name, self.port).map(Arc::from);
        }
        Some(compiled)
    }

    /// Moves the endpoints that packets avoid out of a set: as many as may be, and never all.
    fn avoid(self, set: &mut Vec<SocketAddr>, unselected: &mut Vec<SocketAddr>) {
        // Only connections tell whether an endpoint works.
        if self.avoided.is_empty() || self.port.protocol != Protocol::Tcp {
            return;
        }
        let own = self.avoided.iter().filter(|it| it.port == self.port.name);
        let own: Vec<_> = own.filter(|it| set.binary_search(&it.endpoint).is_ok()).collect();
        let max = own.first().map_or(0, |it| set.len() * usize::from(it.max_percent) / 100);
        let count = own.len().min(max);
        if count < set.len() {
            let avoided: BTreeSet<_> = own[..count].iter().map(|it| it.endpoint).collect();
            set.retain(|it| !avoided.contains(it));
            unselected.extend(avoided);
            unselected.sort_unstable();
            unselected.dedup();
        }
    }

    /// The targets of a list that belong to this port and family.
    fn own(self, targets: &[PortTarget]) -> Vec<SocketAddr> {
        let own = targets.iter().filter(|it| usize::from(it.index) == self.index);
        own.map(|it| it.target).filter(|it| Family::of(it.ip()) == self.family).collect()
    }

    fn at(self, ip: IpAddr, port: u16) -> FrontendAddress {
        FrontendAddress { address: SocketAddr::new(ip, port), protocol: self.port.protocol }
    }

    /// How its packets from outside are forwarded; `None` if they are not. Those of the policy Local never are.
    fn forwarded(self) -> Option<&'a ForwardedPort> {
        let is_own = |it: &&ForwardedPort| (usize::from(it.index), it.family) == (self.index, self.family);
        let mut all = self.state.forwarded.iter();
        all.find(is_own).filter(|_| self.state.service.external_policy == TrafficPolicy::Cluster)
    }

    /// The endpoints for traffic of a scope; for external traffic that is forwarded, those on this node.
    fn targets(self, scope: Scope) -> Vec<SocketAddr> {
        match self.forwarded() {
            Some(it) if scope == Scope::External => it.targets.to_vec(),
            _ => self.state.targets(self.index, self.family, scope).collect(),
        }
    }

    /// Where traffic of a scope goes; also adds it to `compiled.scopes`. Endpoints that exceed the maximum are left out and reported, at the
    /// cluster IP that `compiled.identity` still is.
    fn way(self, scope: Scope, compiled: &mut PortImage, image: &mut ServiceImage) -> Action {
        let mut set = self.targets(scope);
        let targets = set.len();
        set.sort_unstable();
        set.dedup();
        compiled.is_unique &= set.len() == targets;
        if set.is_empty() {
            compiled.scopes.push((scope, None));
            return if *self.port.has_any_endpoint.of(self.family) { Action::Drop } else { Action::Refuse };
        }
        self.avoid(&mut set, &mut compiled.unselected);
        let excess = set.len().saturating_sub(Selector::max_count(compiled.affinity));
        set.truncate(set.len() - excess);
        if excess > 0 {
            let excess = model::counted(excess, "endpoint");
            let reason = format!("{excess} too many for session affinity; the others serve");
            image.reject(&self.state.service, FrontendKind::ClusterIp, compiled.identity, reason);
        }
        // Session affinity is checked against a set: a packet that arrives just when two sets become equal, or cease to
        // be, would lose its endpoint.
        let mut equal = compiled.sets.iter().filter(|_| compiled.affinity == 0);
        let same = equal.find(|(_, it)| **it == *set).map(|(same, _)| *same);
        if same.is_none() {
            compiled.sets.push((scope, set.into()));
        }
        let used = same.unwrap_or(scope);
        compiled.scopes.push((scope, Some(used)));
        Action::To(used)
    }
}
