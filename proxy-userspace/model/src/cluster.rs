//! What a cluster says: Services, EndpointSlices and Nodes, reduced to what the brain reads.
//!
//! The one rule: what is written down here has been understood.
//! Addresses, ports and protocols are values of their types; what could not be read was [`Rejected`] at the rim.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    net::IpAddr,
    num::NonZeroU16,
    sync::Arc,
};

use ipnet::IpNet;

pub use crate::Rejected;
use crate::{
    Family, Protocol, ServiceName, Timestamp,
    state::{self, ClientIpAffinity, ServiceKind, TargetPort, TrafficPolicy},
};

/// Everything a cluster says, as one snapshot.
///
/// Objects stand behind an [`Arc`]: a snapshot shares with the one before it what did not change, and two snapshots
/// are compared by pointers first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterState {
    services: BTreeMap<ServiceName, Arc<Service>>,
    slices: BTreeMap<ServiceName, BTreeMap<SliceName, Arc<EndpointSlice>>>,
    /// Which Service a slice is filed under: a slice may be given another label.
    slice_owners: HashMap<SliceName, ServiceName>,
    nodes: BTreeMap<Arc<str>, Arc<Node>>,
}

impl ClusterState {
    /// All Services, by name.
    pub fn services(&self) -> &BTreeMap<ServiceName, Arc<Service>> {
        &self.services
    }

    /// One Service.
    pub fn service(&self, name: &ServiceName) -> Option<&Arc<Service>> {
        self.services.get(name)
    }

    /// The EndpointSlices that name a Service, whether it exists or not, in the order of their names.
    pub fn slices_of(&self, service: &ServiceName) -> impl Iterator<Item = &Arc<EndpointSlice>> {
        self.slices.get(service).into_iter().flat_map(BTreeMap::values)
    }

    /// One EndpointSlice.
    pub fn slice(&self, name: &SliceName) -> Option<&Arc<EndpointSlice>> {
        self.slices.get(self.slice_owners.get(name)?)?.get(name)
    }

    /// All EndpointSlices, grouped by their Services.
    pub fn slices(&self) -> impl Iterator<Item = &Arc<EndpointSlice>> {
        self.slices.values().flat_map(BTreeMap::values)
    }

    /// All Nodes, by name.
    pub fn nodes(&self) -> &BTreeMap<Arc<str>, Arc<Node>> {
        &self.nodes
    }

    /// One Node.
    pub fn node(&self, name: &str) -> Option<&Arc<Node>> {
        self.nodes.get(name)
    }

    /// Adds a Service, or puts it in the place of the one of the same name; returns that one.
    pub fn set_service(&mut self, service: impl Into<Arc<Service>>) -> Option<Arc<Service>> {
        let service = service.into();
        self.services.insert(service.name.clone(), service)
    }

    /// Takes a Service away and returns it.
    pub fn delete_service(&mut self, name: &ServiceName) -> Option<Arc<Service>> {
        self.services.remove(name)
    }

    /// Adds an EndpointSlice, or puts it in the place of the one of the same name; returns that one.
    ///
    /// Both may belong to different Services: those of the old and of the new slice are affected.
    pub fn set_slice(&mut self, slice: impl Into<Arc<EndpointSlice>>) -> Option<Arc<EndpointSlice>> {
        let slice = slice.into();
        if self.slice_owners.get(&slice.name) == Some(&slice.service)
            && let Some(siblings) = self.slices.get_mut(&slice.service)
        {
            return siblings.insert(slice.name.clone(), slice);
        }
        let old = self.delete_slice(&slice.name);
        self.slice_owners.insert(slice.name.clone(), slice.service.clone());
        self.slices.entry(slice.service.clone()).or_default().insert(slice.name.clone(), slice);
        old
    }

    /// Takes an EndpointSlice away and returns it.
    pub fn delete_slice(&mut self, name: &SliceName) -> Option<Arc<EndpointSlice>> {
        let owner = self.slice_owners.remove(name)?;
        let siblings = self.slices.get_mut(&owner)?;
        let old = siblings.remove(name);
        if siblings.is_empty() {
            self.slices.remove(&owner);
        }
        old
    }

    /// Adds a Node, or puts it in the place of the one of the same name; returns that one.
    pub fn set_node(&mut self, node: impl Into<Arc<Node>>) -> Option<Arc<Node>> {
        let node = node.into();
        self.nodes.insert(node.name.clone(), node)
    }

    /// Takes a Node away and returns it.
    pub fn delete_node(&mut self, name: &str) -> Option<Arc<Node>> {
        self.nodes.remove(name)
    }
}

/// A Service as the cluster describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Its identity.
    pub name: ServiceName,
    /// When it was created: of two Services that want one address, the older one has it.
    pub created: Option<Timestamp>,
    /// Its type; none for `ExternalName`, which is an entry in DNS and nothing to be served.
    pub kind: Option<ServiceKind>,
    /// The label `service.kubernetes.io/service-proxy-name`: the proxy that is to serve it.
    pub proxy_name: Option<String>,
    /// Its cluster IPs, the primary family first; none if it is headless or has not been given one yet.
    pub cluster_ips: Vec<IpAddr>,
    /// `spec.externalIPs`, of any family.
    pub external_ips: Vec<IpAddr>,
    /// The ingress IPs that nodes answer for (`ipMode: VIP` or none), of any family.
    pub load_balancer_ips: Vec<IpAddr>,
    /// Its ports in the order of the manifest; (port, protocol) is unique.
    pub ports: Vec<ServicePort>,
    /// The policy for traffic to a cluster IP.
    pub internal_policy: TrafficPolicy,
    /// The policy for traffic from outside the cluster.
    pub external_policy: TrafficPolicy,
    /// `sessionAffinity: ClientIP` with its time-out, if asked for.
    pub affinity: Option<ClientIpAffinity>,
    /// `spec.loadBalancerSourceRanges`, of any family.
    pub source_ranges: Vec<IpNet>,
    /// `spec.healthCheckNodePort`.
    pub health_check_node_port: Option<NonZeroU16>,
}

/// One port of a [`Service`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Its name, often empty.
    pub name: String,
    /// Its protocol.
    pub protocol: Protocol,
    /// The port at the Service's addresses.
    pub port: NonZeroU16,
    /// The port at the nodes' addresses.
    pub node_port: Option<NonZeroU16>,
    /// Where the manifest says that it leads.
    pub target_port: TargetPort,
}

/// An EndpointSlice's identity: `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SliceName {
    /// The namespace it lives in.
    pub namespace: Arc<str>,
    /// Its name in that namespace.
    pub name: Arc<str>,
}

impl fmt::Display for SliceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// An EndpointSlice of addresses that belongs to a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    /// Its identity.
    pub name: SliceName,
    /// The Service that its label `kubernetes.io/service-name` names, in its own namespace.
    pub service: ServiceName,
    /// Whether it carries the label `service.kubernetes.io/headless`.
    pub headless: bool,
    /// The family of all its addresses.
    pub family: Family,
    /// The ports that each of its endpoints listens on.
    pub ports: Vec<SlicePort>,
    /// Its endpoints.
    pub endpoints: Vec<Endpoint>,
    /// When the change that it was last written for happened (`endpoints.kubernetes.io/last-change-trigger-time`).
    pub trigger_time: Option<Timestamp>,
}

/// One port of an [`EndpointSlice`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicePort {
    /// The name of the service port that it stands for, often empty.
    pub name: String,
    /// Its protocol.
    pub protocol: Protocol,
    /// The port that the endpoints listen on.
    pub port: NonZeroU16,
}

/// One endpoint of an [`EndpointSlice`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Endpoint {
    /// Its address, of the slice's family.
    pub address: IpAddr,
    /// Its conditions.
    pub conditions: Conditions,
    /// The node it runs on, if the slice says so.
    pub node: Option<Arc<str>>,
    /// The name of the pod behind it, if there is one.
    pub pod: Option<Arc<str>>,
    /// Its host name, often empty.
    pub hostname: String,
    /// The nodes that should use it (`hints.forNodes`); empty if there is no hint.
    pub node_hints: Vec<Arc<str>>,
    /// The zones that should use it (`hints.forZones`); empty if there is no hint.
    pub zone_hints: Vec<Arc<str>>,
}

/// The conditions of an [`Endpoint`], with what is not set filled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conditions {
    /// It takes new connections; true if not set.
    pub ready: bool,
    /// It answers, ready or not; true if not set.
    pub serving: bool,
    /// It is going away; false if not set.
    pub terminating: bool,
}

/// A Node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its name.
    pub name: Arc<str>,
    /// Its label `topology.kubernetes.io/zone`.
    pub zone: Option<Arc<str>>,
    /// What backends need to know of it.
    pub info: state::NodeInfo,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(name: &str, service: &str) -> EndpointSlice {
        EndpointSlice {
            name: SliceName { namespace: "ns".into(), name: name.into() },
            service: ServiceName::new("ns", service),
            headless: false,
            family: Family::V4,
            ports: Vec::new(),
            endpoints: Vec::new(),
            trigger_time: None,
        }
    }

    #[test]
    fn a_slice_can_move_to_another_service() {
        let mut facts = ClusterState::default();
        assert_eq!(facts.set_slice(slice("s", "a")), None);
        assert_eq!(facts.set_slice(slice("s", "b")), Some(Arc::new(slice("s", "a"))));
        assert_eq!(facts.slices_of(&ServiceName::new("ns", "a")).count(), 0);
        assert_eq!(facts.slices_of(&ServiceName::new("ns", "b")).count(), 1);
    }

    #[test]
    fn what_was_set_and_deleted_leaves_no_trace() {
        let mut facts = ClusterState::default();
        facts.set_slice(slice("s", "a"));
        facts.delete_slice(&slice("s", "a").name);
        facts.set_node(Node { name: "n".into(), zone: None, info: state::NodeInfo::default() });
        facts.delete_node("n");
        assert_eq!(facts, ClusterState::default());
    }
}
