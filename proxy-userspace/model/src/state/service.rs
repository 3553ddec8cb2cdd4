//! Services, as the cluster describes them, and as one node serves them.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    num::{NonZeroU16, NonZeroU32},
    sync::Arc,
};

use ipnet::IpNet;

use super::{
    LoadBalancing, Memo,
    endpoint::{Endpoint, EndpointKey, PortTarget, Scope},
    forwarding::ForwardedPort,
};
use crate::{Family, PerFamily, Protocol, ServiceMetadata, ServiceName, Timestamp, diff::differing};

/// One Service together with the endpoints that this node may use for it.
///
/// Two states are equal if a node serves them alike: the trigger time is not compared.
#[derive(Clone, Debug)]
pub struct ServiceState {
    pub service: Arc<Service>,
    /// Its endpoints, sorted by [`Endpoint::key`]; most are shared with the states of other nodes.
    pub endpoints: Vec<Arc<Endpoint>>,
    /// Targets that serve it and were not selected for this node, in ascending order; of TCP only if it drains.
    ///
    /// Existing flows to them continue: a flow without a connection, or a connection that is drained, ends when its endpoint
    /// stops serving, not when the endpoint is no longer selected.
    pub other_serving: Arc<[PortTarget]>,
    /// Targets of its UDP ports that are still there and do not serve, in ascending order: not ready, or terminating.
    ///
    /// The Service sends nothing to them, and others may talk to them without it.
    pub not_serving: Arc<[PortTarget]>,
    /// The ports whose packets from outside are forwarded whole, in ascending order of index and family; mostly none.
    pub forwarded: Arc<[ForwardedPort]>,
    /// The time of the last change of the endpoints in the cluster that led to this state
    /// (`endpoints.kubernetes.io/last-change-trigger-time`), if known.
    ///
    /// If it did not change between two states, something else did: the Service itself or a Node.
    pub trigger_time: Option<Timestamp>,
    /// What a later stage has derived from this state.
    pub memo: Memo,
}

impl PartialEq for ServiceState {
    fn eq(&self, other: &Self) -> bool {
        self.service == other.service
            && self.endpoints == other.endpoints
            && self.other_serving == other.other_serving
            && self.not_serving == other.not_serving
            && self.forwarded == other.forwarded
    }
}

impl Eq for ServiceState {}

impl ServiceState {
    /// A Service and its endpoints, which must be sorted by [`Endpoint::key`].
    pub fn new(service: impl Into<Arc<Service>>, endpoints: impl IntoIterator<Item = Endpoint>) -> Self {
        let mut endpoints: Vec<_> = endpoints.into_iter().map(Arc::new).collect();
        // `collect` reuses the memory of a source vector of endpoints, 13 times as much.
        endpoints.shrink_to_fit();
        Self {
            service: service.into(),
            endpoints,
            other_serving: Arc::default(),
            not_serving: Arc::default(),
            forwarded: Arc::default(),
            trigger_time: None,
            memo: Memo::default(),
        }
    }

    /// Replaces the Service and the endpoints that are equal in `other` by the objects in `other`, so that both share
    /// them.
    pub fn reuse_equal(&mut self, other: &Self) {
        reuse_equal(&mut self.service, &other.service);
        reuse_equal(&mut self.other_serving, &other.other_serving);
        reuse_equal(&mut self.not_serving, &other.not_serving);
        reuse_equal(&mut self.forwarded, &other.forwarded);
        let mut others = other.endpoints.iter().peekable();
        for own in &mut self.endpoints {
            while others.next_if(|it| it.key < own.key).is_some() {}
            if let Some(same) = others.next_if(|it| *it == own) {
                *own = Arc::clone(same);
            }
        }
    }

    /// The endpoints that differ from those `before`; what both states share costs next to nothing.
    pub fn endpoint_diff<'a>(&'a self, before: &'a Self) -> EndpointDiff<'a> {
        let mut diff = EndpointDiff::default();
        for (_, removed, added) in differing(before.endpoints_by_key(), self.endpoints_by_key()) {
            if removed != added {
                diff.removed.extend(removed.map(AsRef::as_ref));
                diff.added.extend(added.map(AsRef::as_ref));
            }
        }
        diff
    }

    /// The endpoints with their keys, in ascending order.
    pub fn endpoints_by_key(&self) -> impl Iterator<Item = (&EndpointKey, &Arc<Endpoint>)> {
        self.endpoints.iter().map(|it| (&it.key, it))
    }

    /// The targets for traffic of `scope` to `service.ports[port]` in one family, in the order of the endpoints.
    pub fn targets(&self, port: usize, family: Family, scope: Scope) -> impl Iterator<Item = SocketAddr> {
        self.endpoints.iter().filter_map(move |it| it.target(port, family, scope))
    }
}

/// Replaces an object by an equal one.
pub(super) fn reuse_equal<T: Eq + ?Sized>(own: &mut Arc<T>, other: &Arc<T>) {
    if *own == *other {
        *own = Arc::clone(other);
    }
}

/// The difference between the endpoints of two states of a Service; one that has changed is in both lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointDiff<'a> {
    /// What was there.
    pub removed: Vec<&'a Endpoint>,
    /// What is there.
    pub added: Vec<&'a Endpoint>,
}

impl EndpointDiff<'_> {
    /// How it changes the targets of a port, as [`ServiceState::targets`] has them.
    pub fn targets(&self, port: usize, family: Family, scope: Scope) -> TargetDiff {
        let of = |endpoints: &[&Endpoint]| {
            let mut targets: Vec<_> =
                endpoints.iter().filter_map(|it| it.target(port, family, scope)).collect();
            targets.sort_unstable();
            targets.dedup();
            targets
        };
        let (mut removed, mut added) = (of(&self.removed), of(&self.added));
        let before = removed.clone();
        removed.retain(|it| added.binary_search(it).is_err());
        added.retain(|it| before.binary_search(it).is_err());
        TargetDiff { removed, added }
    }
}

/// The difference between the targets of a port in two states; both lists are sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetDiff {
    /// Targets of endpoints that are gone or have changed; another endpoint may have the same target.
    pub removed: Vec<SocketAddr>,
    /// Targets of endpoints that are new or have changed.
    pub added: Vec<SocketAddr>,
}

/// A Service without its endpoints, as the cluster describes it or as a node serves it.
///
/// Of a cluster, its ports have neither conflicts nor endpoints. Of a node, it has a cluster IP of each family in which it has
/// addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Service {
    pub name: ServiceName,
    /// `metadata.creationTimestamp`, which decides conflicts, see [`crate::conflicts`]; `None` in the state of a node.
    pub created: Option<Timestamp>,
    pub kind: ServiceKind,
    /// The label `service.kubernetes.io/service-proxy-name`: the proxy that serves it; `None` in the state of a node.
    pub proxy_name: Option<String>,
    /// Its cluster IPs, the primary family first, at most one of each family; none if it is headless or none is allocated yet.
    pub cluster_ips: Vec<IpAddr>,
    /// `spec.externalIPs`; of a cluster, of any family.
    pub external_ips: Vec<IpAddr>,
    /// The ingress IPs that nodes handle themselves (`ipMode: VIP` or none); of a cluster, of any family.
    pub load_balancer_ips: Vec<IpAddr>,
    /// Its ports, in the order of the manifest; (port, protocol) is unique.
    pub ports: Vec<ServicePort>,
    /// The policy for traffic to a cluster IP.
    pub internal_policy: TrafficPolicy,
    /// The policy for traffic from outside the cluster.
    pub external_policy: TrafficPolicy,
    /// `sessionAffinity: ClientIP` with its timeout, if set.
    pub affinity: Option<ClientIpAffinity>,
    pub load_balancing: LoadBalancing,
    /// The source ranges that may use a load balancer IP (`spec.loadBalancerSourceRanges`); a family without a range is open.
    /// Of a cluster, of any family.
    pub source_ranges: Vec<IpNet>,
    /// `spec.healthCheckNodePort`, the port of the health check of the local endpoints; of a node, only with the type
    /// LoadBalancer and the external policy Local.
    pub health_check_node_port: Option<NonZeroU16>,
    /// Its labels and annotations that are requested, if it has any of them; no datapath uses them.
    pub metadata: Option<Arc<ServiceMetadata>>,
}

impl Service {
    /// A Service of type ClusterIP without addresses and ports, to be completed.
    pub fn new(name: ServiceName) -> Self {
        Self { name, ..Self::default() }
    }

    /// All its addresses: cluster, external and load balancer IPs; an address may appear twice.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        [&self.cluster_ips, &self.external_ips, &self.load_balancer_ips].into_iter().flatten().copied()
    }

    /// Whether one of its ports has a node port, an external IP or a load balancer IP in a family.
    pub fn is_external(&self, port: &ServicePort, family: Family) -> bool {
        port.node_port.is_some() || self.has_external_ip(port, family)
    }

    /// Whether one of its ports has an external IP or a load balancer IP in a family.
    pub fn has_external_ip(&self, port: &ServicePort, family: Family) -> bool {
        let mut addresses = self.external_ips.iter().chain(&self.load_balancer_ips);
        addresses.any(|it| Family::of(*it) == family && !port.conflicting_addresses.contains(it))
    }
}

/// The `type` of a Service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServiceKind {
    #[default]
    ClusterIp,
    NodePort,
    LoadBalancer,
    /// A DNS entry only, which no node serves.
    ExternalName,
}

impl fmt::Display for ServiceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ClusterIp => "ClusterIP",
            Self::NodePort => "NodePort",
            Self::LoadBalancer => "LoadBalancer",
            Self::ExternalName => "ExternalName",
        })
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrafficPolicy {
    #[default]
    Cluster,
    Local,
}

/// Session affinity by client address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientIpAffinity {
    /// Seconds after its last connection for which a client keeps its endpoint.
    pub timeout_seconds: NonZeroU32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Empty if the port has no name.
    pub name: String,
    /// Its protocol; the same number may be used once per protocol.
    pub protocol: Protocol,
    /// The port at the Service's addresses.
    pub port: NonZeroU16,
    /// The port at the nodes' addresses.
    pub node_port: Option<NonZeroU16>,
    /// Addresses of the Service at which this port belongs to another Service, see [`crate::conflicts`].
    pub conflicting_addresses: Vec<IpAddr>,
    /// The target port of the manifest, for display: the endpoints have the actual numbers.
    pub target_port: TargetPort,
    /// Whether any endpoint in the cluster could serve it, even if this node may not use it, per family.
    /// A port without a target on this node drops traffic if so, and otherwise rejects it.
    pub has_any_endpoint: PerFamily<bool>,
}

impl ServicePort {
    /// A port without a name, a node port and endpoints, to be completed.
    pub fn new(protocol: Protocol, port: NonZeroU16) -> Self {
        Self {
            name: String::new(),
            protocol,
            port,
            node_port: None,
            conflicting_addresses: Vec::new(),
            target_port: TargetPort::Number(port),
            has_any_endpoint: PerFamily::default(),
        }
    }
}

/// The `targetPort` of a Service port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetPort {
    /// A number; `port` if the manifest has none.
    Number(NonZeroU16),
    /// The name of a container port.
    Name(String),
}
