//! Endpoints of a Service, as one node may use them.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    num::NonZeroU16,
    sync::Arc,
};

use crate::Family;

/// A pod, or an address without a pod. A dual-stack pod whose ports are the same in both families is one endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Stable, and unique within its Service.
    pub key: EndpointKey,
    /// Its host name, often empty.
    pub hostname: Box<str>,
    pub v4: Option<Ipv4Addr>,
    pub v6: Option<Ipv6Addr>,
    /// Whether it runs on this node.
    pub local: bool,
    /// Whether it is terminating and selected only because no endpoint is ready (KEP-1669): load balancers should send
    /// new traffic elsewhere.
    pub serving_terminating: bool,
    /// The service ports that it serves, in ascending order of index; most endpoints share the list.
    pub ports: Arc<[EndpointPort]>,
}

impl Endpoint {
    /// An endpoint without addresses and ports, to be completed.
    pub fn new(key: EndpointKey) -> Self {
        Self {
            key,
            hostname: Box::default(),
            v4: None,
            v6: None,
            local: false,
            serving_terminating: false,
            ports: Arc::default(),
        }
    }

    pub fn address(&self, family: Family) -> Option<IpAddr> {
        match family {
            Family::V4 => self.v4.map(IpAddr::V4),
            Family::V6 => self.v6.map(IpAddr::V6),
        }
    }

    /// Its target for traffic of `scope` to the port at position `port` of its Service in one family.
    pub fn target(&self, port: usize, family: Family, scope: Scope) -> Option<SocketAddr> {
        let address = self.address(family)?;
        let target = self.ports.binary_search_by_key(&port, |it| it.index.into()).ok()?;
        let target = self.ports.get(target)?;
        target.scopes.contains(scope).then(|| SocketAddr::new(address, target.port.get()))
    }
}

/// The identity of an endpoint within its Service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndpointKey {
    /// The name of its pod.
    Pod(Arc<str>),
    /// An endpoint without a pod: any stable, opaque id without a slash.
    Anonymous(Arc<str>),
}

/// One port of its Service that an endpoint serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointPort {
    /// The position in [`Service::ports`](super::Service::ports).
    pub index: u16,
    /// The port that the endpoint listens on.
    pub port: NonZeroU16,
    /// The traffic that it may receive.
    pub scopes: Scopes,
}

/// A target of a port of a Service that was not selected for this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PortTarget {
    /// The position in [`Service::ports`](super::Service::ports).
    pub index: u16,
    pub target: SocketAddr,
}

/// A kind of traffic to a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// To a cluster IP.
    Internal,
    /// From outside the cluster, to a node port, an external IP or a load balancer IP.
    External,
    /// From a pod or the node itself, to a node port, an external IP or a load balancer IP: the short circuit, which
    /// skips the load balancer and ignores `externalTrafficPolicy: Local`.
    Cluster,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Scopes {
    pub internal: bool,
    pub external: bool,
    pub cluster: bool,
}

impl Scopes {
    pub fn contains(self, scope: Scope) -> bool {
        match scope {
            Scope::Internal => self.internal,
            Scope::External => self.external,
            Scope::Cluster => self.cluster,
        }
    }

    pub fn is_empty(self) -> bool {
        self == Self::default()
    }
}
