//! The state of one node, and what it says about every node of the cluster and about pods.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use ipnet::IpNet;

use super::service::{ServiceState, reuse_equal};
use crate::{
    ServiceName,
    object_map::{Diff, Keyed, ObjectMap},
};

pub type Services = ObjectMap<ServiceState>;

impl Keyed for ServiceState {
    type Key = ServiceName;

    fn key(&self) -> &ServiceName {
        &self.service.name
    }
}

/// Revisions, and the states of different nodes, share what is equal: a copy is cheap, and so is a diff.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeState {
    pub services: Services,
    /// All nodes of the cluster, this one included.
    pub nodes: NodeInfos,
    /// The ranges of cluster IPs.
    pub service_cidrs: ServiceCidrs,
    /// The pods whose annotation says how their sockets are served, of other nodes, too.
    pub pods: Pods,
}

impl NodeState {
    /// The Services that differ from those of `before`, in the order of their names: name, before, after.
    ///
    /// If one state was made from the other, the cost is proportional to the difference.
    pub fn diff<'a>(&'a self, before: &'a Self) -> Diff<'a, ServiceState> {
        self.services.diff(&before.services)
    }

    /// Replaces what is equal in `before` by the object in `before`, so that both share it.
    pub fn reuse_equal(&mut self, before: &Self) {
        self.services.reuse_equal(&before.services);
        reuse_equal(&mut self.nodes, &before.nodes);
        reuse_equal(&mut self.service_cidrs, &before.service_cidrs);
        reuse_equal(&mut self.pods, &before.pods);
    }
}

/// The ServiceCIDRs of a cluster by name; the states of all nodes share it.
pub type ServiceCidrs = Arc<BTreeMap<Arc<str>, Arc<ServiceCidr>>>;

/// A ServiceCIDR: packets to an address in it that no Service has are dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceCidr {
    pub name: Arc<str>,
    /// Its ranges (`spec.cidrs`).
    pub cidrs: Vec<IpNet>,
}

/// All nodes of a cluster by name; the states of all nodes share it.
pub type NodeInfos = Arc<BTreeMap<Arc<str>, NodeInfo>>;

/// The properties of a node that datapaths and health checks use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeInfo {
    /// Its addresses: `status.addresses` of the type InternalIP, then of the type ExternalIP, in the order of the manifest. The
    /// first of each family is its primary address.
    pub addresses: Vec<IpAddr>,
    /// The ranges of its pods (`spec.podCIDRs`).
    pub pod_cidrs: Vec<IpNet>,
    /// Whether load balancers should send new traffic to other nodes (KEP-3836): it has a deletion timestamp, or the
    /// taint `ToBeDeletedByClusterAutoscaler`.
    pub is_being_deleted: bool,
}

/// The pods whose annotation says how their sockets are served, by name; the states of all nodes share it, and each node looks
/// for those that it runs.
pub type Pods = Arc<BTreeMap<Arc<str>, Arc<Pod>>>;

/// A pod whose annotation `kube-proxy-ebpf.io/socket-lb` says how its sockets are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its `namespace/name`.
    pub name: Arc<str>,
    /// The UID by which kubelet names its cgroup.
    pub uid: Arc<str>,
    pub socket_lb: SocketLb,
}

/// Which sockets of a pod are load-balanced, rather than left to packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketLb {
    /// No socket of the pod.
    Off,
    /// The TCP sockets of the pod.
    TcpOnly,
}
