//! What one node must do: its full service state, the brain's answer and the backend's input.
//!
//! Everything is decided here: an [`Endpoint`] is present only if this node may use it for something, and its
//! [`Scopes`] say for what.
//! Nothing of Kubernetes is left: no slices, conditions, hints or fallbacks.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    num::{NonZeroU16, NonZeroU32},
    ops::{Deref, DerefMut},
    sync::Arc,
};

use ipnet::IpNet;

use crate::{
    Family, Protocol, ServiceName, Timestamp,
    services::{Diff, Services},
};

/// The full state of one node.
///
/// What did not change is shared between revisions and between nodes: a copy is cheap, and so is a difference.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeState {
    /// The services to be served, by name.
    pub services: Services,
    /// The cluster's nodes, this one among them.
    pub nodes: NodeInfos,
}

impl NodeState {
    /// How the services differ from those of `before`, in the order of the names: name, before, after.
    ///
    /// It costs what differs, where one state came from the other.
    pub fn diff<'a>(&'a self, before: &'a Self) -> Diff<'a> {
        self.services.diff(&before.services)
    }

    /// Takes from `before` what is of the same value here, so that both share it.
    pub fn reuse_equal(&mut self, before: &Self) {
        self.services.reuse_equal(&before.services);
        if self.nodes == before.nodes {
            self.nodes = before.nodes.clone();
        }
    }
}

/// The nodes of a cluster by name, shared between the states of all of them.
#[derive(Clone, Debug, Default)]
pub struct NodeInfos(Arc<BTreeMap<Arc<str>, NodeInfo>>);

impl NodeInfos {
    /// Whether both are the very same.
    pub fn ptr_eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Deref for NodeInfos {
    type Target = BTreeMap<Arc<str>, NodeInfo>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for NodeInfos {
    fn deref_mut(&mut self) -> &mut Self::Target {
        Arc::make_mut(&mut self.0)
    }
}

impl FromIterator<(Arc<str>, NodeInfo)> for NodeInfos {
    fn from_iter<T: IntoIterator<Item = (Arc<str>, NodeInfo)>>(nodes: T) -> Self {
        Self(Arc::new(nodes.into_iter().collect()))
    }
}

impl PartialEq for NodeInfos {
    fn eq(&self, other: &Self) -> bool {
        self.ptr_eq(other) || self.0 == other.0
    }
}

impl Eq for NodeInfos {}

/// What a backend needs to know of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeInfo {
    /// Its addresses (`status.addresses` of the types InternalIP and ExternalIP), in the order of the manifest.
    pub addresses: Vec<IpAddr>,
    /// Where its pods get their addresses from (`spec.podCIDRs`).
    pub pod_cidrs: Vec<IpNet>,
    /// Whether it is about to go, so that load balancers should look elsewhere (KEP-3836): it has a deletion timestamp,
    /// or the taint `ToBeDeletedByClusterAutoscaler`.
    pub is_being_deleted: bool,
}

/// One Service together with the endpoints this node may use for it.
///
/// Two states are equal if they ask the same of the node: the time of the last change makes no difference.
#[derive(Clone, Debug)]
pub struct ServiceState {
    /// The Service itself.
    pub service: Arc<Service>,
    /// Its endpoints, sorted by [`Endpoint::key`]; most are shared with the states of other nodes.
    pub endpoints: Vec<Arc<Endpoint>>,
    /// Where it is served too, but this node sends nothing new, in ascending order; never for TCP.
    ///
    /// What goes there already is left alone: flows without connections end with the endpoint, not with its selection.
    pub other_serving: Arc<[OtherServing]>,
    /// When the last change of the endpoints that led to this state happened in the cluster
    /// (`endpoints.kubernetes.io/last-change-trigger-time`), if it is known.
    ///
    /// A state whose time is that of the one before came from another change, of the Service itself or of a Node.
    pub trigger_time: Option<Timestamp>,
}

impl PartialEq for ServiceState {
    fn eq(&self, other: &Self) -> bool {
        self.service == other.service
            && self.endpoints == other.endpoints
            && self.other_serving == other.other_serving
    }
}

impl Eq for ServiceState {}

impl ServiceState {
    /// A Service and its endpoints, which are sorted by [`Endpoint::key`].
    pub fn new(service: impl Into<Arc<Service>>, endpoints: impl IntoIterator<Item = Endpoint>) -> Self {
        let mut endpoints: Vec<_> = endpoints.into_iter().map(Arc::new).collect();
        // Collected from a vector, it would keep that one's memory, 13 times as much.
        endpoints.shrink_to_fit();
        Self { service: service.into(), endpoints, other_serving: Arc::default(), trigger_time: None }
    }

    /// Takes from `other` the Service and the endpoints that are of the same value here, so that both share them.
    pub fn reuse_equal(&mut self, other: &Self) {
        if self.service == other.service {
            self.service = Arc::clone(&other.service);
        }
        if self.other_serving == other.other_serving {
            self.other_serving = Arc::clone(&other.other_serving);
        }
        let mut others = other.endpoints.iter().peekable();
        for own in &mut self.endpoints {
            while others.next_if(|it| it.key < own.key).is_some() {}
            if let Some(same) = others.next_if(|it| *it == own) {
                *own = Arc::clone(same);
            }
        }
    }

    /// Where traffic of `scope` to the port `service.ports[port]` may go, in one family, in the order of the endpoints.
    pub fn targets(&self, port: usize, family: Family, scope: Scope) -> impl Iterator<Item = SocketAddr> {
        self.endpoints.iter().filter_map(move |endpoint| {
            let address = endpoint.address(family)?;
            let target = endpoint.ports.binary_search_by_key(&port, |it| it.index.into()).ok()?;
            let target = endpoint.ports.get(target)?;
            target.scopes.contains(scope).then(|| SocketAddr::new(address, target.port.get()))
        })
    }
}

/// A Service as a backend needs to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Its identity.
    pub name: ServiceName,
    /// How far it is meant to be reachable.
    pub kind: ServiceKind,
    /// Its cluster IPs, the primary family first; at most one of each family.
    pub cluster_ips: Vec<IpAddr>,
    /// Its external IPs, of families that have a cluster IP.
    pub external_ips: Vec<IpAddr>,
    /// The load balancer IPs that the node itself answers for (`ipMode: VIP`).
    pub load_balancer_ips: Vec<IpAddr>,
    /// Its ports, in the order of the manifest; (port, protocol) is unique.
    pub ports: Vec<ServicePort>,
    /// The policy for traffic to a cluster IP.
    pub internal_policy: TrafficPolicy,
    /// The policy for traffic from outside the cluster.
    pub external_policy: TrafficPolicy,
    /// `sessionAffinity: ClientIP` with its time-out, if asked for.
    pub affinity: Option<ClientIpAffinity>,
    /// Who may use a load balancer IP; a family without a range here is open.
    pub source_ranges: Vec<IpNet>,
    /// Where the health of the local endpoints is asked for (external policy Local).
    pub health_check_node_port: Option<NonZeroU16>,
}

/// The `type` of a Service that is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceKind {
    /// Reachable at its cluster IPs.
    ClusterIp,
    /// Also at a port of every node.
    NodePort,
    /// Also at the addresses of a load balancer.
    LoadBalancer,
}

/// A traffic policy of a Service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrafficPolicy {
    /// Any endpoint of the cluster.
    #[default]
    Cluster,
    /// Only endpoints on this node.
    Local,
}

/// Session affinity by client address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientIpAffinity {
    /// Seconds after its last connection for which a client keeps its endpoint.
    pub timeout_seconds: NonZeroU32,
}

/// One port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Its name, often empty.
    pub name: String,
    /// Its protocol; the same number may be used once per protocol.
    pub protocol: Protocol,
    /// The port at the Service's addresses.
    pub port: NonZeroU16,
    /// The port at the nodes' addresses.
    pub node_port: Option<NonZeroU16>,
    /// Addresses of the Service at which an older Service answers on this port, and this one does not.
    pub conflicting_addresses: Vec<IpAddr>,
    /// The target port as the manifest names it; for display, the endpoints say where to go.
    pub target_port: TargetPort,
    /// Whether some endpoint of the cluster could serve it, even if not from this node, per family:
    /// an empty set then means *drop*, and else *refuse*.
    pub has_any_endpoint: PerFamily<bool>,
}

/// The `targetPort` of a Service port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetPort {
    /// A number; the port itself where the manifest has none.
    Number(NonZeroU16),
    /// The name of a container port.
    Name(String),
}

/// Something that exists once per address family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerFamily<T> {
    /// For IPv4.
    pub v4: T,
    /// For IPv6.
    pub v6: T,
}

impl<T> PerFamily<T> {
    /// The value of one family.
    pub fn of(&self, family: Family) -> &T {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    /// The value of one family, to be changed.
    pub fn of_mut(&mut self, family: Family) -> &mut T {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }
}

/// One endpoint: a pod, or an address without one. A dual-stack pod that serves alike in both families is one endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Stable and unique within its Service.
    pub key: EndpointKey,
    /// Its host name, often empty.
    pub hostname: String,
    /// Its IPv4 address.
    pub v4: Option<Ipv4Addr>,
    /// Its IPv6 address.
    pub v6: Option<Ipv6Addr>,
    /// Whether it runs on this node.
    pub local: bool,
    /// Whether it is about to go, and serves only because no other endpoint does, so that load balancers should look
    /// elsewhere (KEP-1669).
    pub serving_terminating: bool,
    /// The service ports it serves here, in ascending order of index.
    pub ports: Vec<EndpointPort>,
}

impl Endpoint {
    /// Its address in one family.
    pub fn address(&self, family: Family) -> Option<IpAddr> {
        match family {
            Family::V4 => self.v4.map(IpAddr::V4),
            Family::V6 => self.v6.map(IpAddr::V6),
        }
    }
}

/// What tells the endpoints of one Service apart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndpointKey {
    /// The name of the pod behind it.
    Pod(String),
    /// No pod: any stable, opaque id without a slash.
    Anonymous(String),
}

/// How an endpoint serves one port of its Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointPort {
    /// The position in [`Service::ports`].
    pub index: u16,
    /// The port the endpoint listens on.
    pub port: NonZeroU16,
    /// The traffic it may be given.
    pub scopes: Scopes,
}

/// A target that serves one port of a Service, and is not among those that this node chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OtherServing {
    /// The position in [`Service::ports`].
    pub index: u16,
    /// Where it listens.
    pub target: SocketAddr,
}

/// Traffic that an endpoint may be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// To a cluster IP.
    Internal,
    /// From outside the cluster, to a node port, an external IP or a load balancer IP.
    External,
    /// From a pod or the node itself, to one of those (the short circuit).
    Cluster,
}

/// A set of [`Scope`]s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Scopes {
    /// Contains [`Scope::Internal`].
    pub internal: bool,
    /// Contains [`Scope::External`].
    pub external: bool,
    /// Contains [`Scope::Cluster`].
    pub cluster: bool,
}

impl Scopes {
    /// Whether `scope` is one of them.
    pub fn contains(self, scope: Scope) -> bool {
        match scope {
            Scope::Internal => self.internal,
            Scope::External => self.external,
            Scope::Cluster => self.cluster,
        }
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }
}
