//! A snapshot of a cluster: Services, EndpointSlices, Nodes, ServiceCIDRs and some Pods, reduced to the fields that the brain
//! reads.
//!
//! Invariant: every value is valid.
//! Addresses, ports and protocols are parsed; a field that cannot be parsed is [`Rejected`](crate::Rejected) by the source.

mod object;

use std::{collections::BTreeSet, fmt, net::IpAddr, num::NonZeroU16, sync::Arc};

use crate::{
    Family, Protocol, ServiceName, Timestamp,
    object_map::{Keyed, ObjectMap},
    state::{self, Memo, Pod, Pods, ServiceCidr, ServiceCidrs},
};

pub use crate::state::Service;
pub use object::{ClusterChanges, Object, ObjectName};

/// Successive snapshots share what did not change: a copy is cheap, and so is a diff.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterState {
    pub services: ObjectMap<Service>,
    pub nodes: ObjectMap<Node>,
    pub service_cidrs: ServiceCidrs,
    /// The pods whose annotation says how their sockets are served.
    pub pods: Pods,
    slices: ObjectMap<ServiceSlices>,
    /// The key in `slices` of each slice: the label of a slice can change.
    slice_owners: ObjectMap<SliceOwner>,
}

impl ClusterState {
    /// The EndpointSlices of a Service, in the order of their names; the Service need not exist.
    pub fn slices_of(&self, service: &ServiceName) -> impl Iterator<Item = &Arc<EndpointSlice>> {
        self.slices.get(service).into_iter().flat_map(|it| &it.slices)
    }

    pub fn slice(&self, name: &SliceName) -> Option<&Arc<EndpointSlice>> {
        let siblings = &self.slices.get(&self.slice_owners.get(name)?.service)?.slices;
        siblings.get(position(siblings, name).ok()?)
    }

    /// All EndpointSlices, grouped by their Services.
    pub fn slices(&self) -> impl Iterator<Item = &Arc<EndpointSlice>> {
        self.slices.values().flat_map(|it| &it.slices)
    }

    /// The Services whose EndpointSlices differ from those in `before`, in the order of their names.
    pub fn services_with_changed_slices<'a>(
        &'a self,
        before: &'a Self,
    ) -> impl Iterator<Item = &'a ServiceName> {
        self.slices.diff(&before.slices).map(|(name, ..)| name)
    }

    /// Adds an EndpointSlice, or replaces the one of the same name, which may belong to another Service.
    pub fn set_slice(&mut self, slice: impl Into<Arc<EndpointSlice>>) {
        let slice = slice.into();
        let service = slice.service.clone();
        if self.slice_owners.get(&slice.name).is_none_or(|it| it.service != service) {
            self.delete_slice(&slice.name);
            self.slice_owners.insert(SliceOwner { name: slice.name.clone(), service: service.clone() });
        }
        let mut slices: Vec<_> = self.slices_of(&service).cloned().collect();
        match position(&slices, &slice.name) {
            Ok(at) => slices[at] = slice,
            Err(at) => slices.insert(at, slice),
        }
        self.slices.insert(ServiceSlices { service, slices });
    }

    pub fn delete_slice(&mut self, name: &SliceName) {
        let Some(owner) = self.slice_owners.remove(name) else { return };
        let others = self.slices_of(&owner.service).filter(|it| it.name != *name);
        let slices: Vec<_> = others.cloned().collect();
        let service = owner.service.clone();
        match slices.is_empty() {
            true => drop(self.slices.remove(&service)),
            false => drop(self.slices.insert(ServiceSlices { service, slices })),
        }
    }

    pub fn set_service_cidr(&mut self, it: impl Into<Arc<ServiceCidr>>) {
        let it = it.into();
        Arc::make_mut(&mut self.service_cidrs).insert(Arc::clone(&it.name), it);
    }

    pub fn delete_service_cidr(&mut self, name: &str) {
        Arc::make_mut(&mut self.service_cidrs).remove(name);
    }

    pub fn set_pod(&mut self, it: impl Into<Arc<Pod>>) {
        let it = it.into();
        Arc::make_mut(&mut self.pods).insert(Arc::clone(&it.name), it);
    }

    pub fn delete_pod(&mut self, name: &str) {
        Arc::make_mut(&mut self.pods).remove(name);
    }
}

/// The EndpointSlices of a Service, in the order of their names; at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ServiceSlices {
    service: ServiceName,
    slices: Vec<Arc<EndpointSlice>>,
}

impl Keyed for ServiceSlices {
    type Key = ServiceName;

    fn key(&self) -> &ServiceName {
        &self.service
    }
}

fn position(slices: &[Arc<EndpointSlice>], name: &SliceName) -> Result<usize, usize> {
    slices.binary_search_by(|it| it.name.cmp(name))
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct SliceOwner {
    name: SliceName,
    service: ServiceName,
}

impl Keyed for SliceOwner {
    type Key = SliceName;

    fn key(&self) -> &SliceName {
        &self.name
    }
}

impl Keyed for Service {
    type Key = ServiceName;

    fn key(&self) -> &ServiceName {
        &self.name
    }
}

impl Keyed for Node {
    type Key = Arc<str>;

    fn key(&self) -> &Arc<str> {
        &self.name
    }
}

/// An EndpointSlice's identity: `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SliceName {
    pub namespace: Arc<str>,
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
    pub name: SliceName,
    /// The Service of its label `kubernetes.io/service-name`, in its own namespace.
    pub service: ServiceName,
    /// Whether it has the label `service.kubernetes.io/headless`.
    pub headless: bool,
    pub family: Family,
    pub ports: Vec<SlicePort>,
    pub endpoints: Vec<Endpoint>,
    /// The time of the last change that it reflects (`endpoints.kubernetes.io/last-change-trigger-time`).
    pub trigger_time: Option<Timestamp>,
    /// What a later stage has derived from this slice.
    pub memo: Memo,
}

impl EndpointSlice {
    /// A slice without ports and endpoints, to be completed.
    pub fn new(name: SliceName, service: ServiceName, family: Family) -> Self {
        Self {
            name,
            service,
            headless: false,
            family,
            ports: Vec::new(),
            endpoints: Vec::new(),
            trigger_time: None,
            memo: Memo::default(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SlicePort {
    /// The name of its service port, often empty.
    pub name: String,
    pub protocol: Protocol,
    pub port: NonZeroU16,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Endpoint {
    /// Its address, of the slice's family.
    pub address: IpAddr,
    pub conditions: Conditions,
    pub node: Option<Arc<str>>,
    /// The name of its pod, if it has one.
    pub pod: Option<Arc<str>>,
    /// Its host name, often empty.
    pub hostname: Box<str>,
    pub hints: Option<Arc<Hints>>,
}

/// Who should use an endpoint; most endpoints of a slice share theirs.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hints {
    /// The nodes that should use it (`hints.forNodes`).
    pub nodes: Vec<Arc<str>>,
    /// The zones that should use it (`hints.forZones`).
    pub zones: Vec<Arc<str>>,
}

impl Hints {
    /// The hints of an endpoint; `None` if there are none.
    pub fn of_endpoint(self) -> Option<Arc<Self>> {
        (self != Self::default()).then(|| Arc::new(self))
    }

    /// The hints of an endpoint; `None` if there are none. `known` are those of the endpoints before, which it shares.
    pub fn shared(self, known: &mut BTreeSet<Arc<Self>>) -> Option<Arc<Self>> {
        if let Some(it) = known.get(&self) {
            return Some(Arc::clone(it));
        }
        let hints = self.of_endpoint();
        known.extend(hints.clone());
        hints
    }
}

impl Endpoint {
    /// A ready endpoint without a node, a pod and hints, to be completed.
    pub fn new(address: IpAddr) -> Self {
        Self {
            address,
            conditions: Conditions { ready: true, serving: true, terminating: false },
            node: None,
            pod: None,
            hostname: Box::default(),
            hints: None,
        }
    }

    pub fn node_hints(&self) -> &[Arc<str>] {
        self.hints.as_ref().map_or(&[], |it| &it.nodes)
    }

    pub fn zone_hints(&self) -> &[Arc<str>] {
        self.hints.as_ref().map_or(&[], |it| &it.zones)
    }
}

/// The conditions of an [`Endpoint`], with the defaults of Kubernetes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conditions {
    /// It accepts new connections; true if not set.
    pub ready: bool,
    /// It serves traffic, ready or not; true if not set.
    pub serving: bool,
    /// It is being deleted; false if not set.
    pub terminating: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub name: Arc<str>,
    /// Its label `topology.kubernetes.io/zone`.
    pub zone: Option<Arc<str>>,
    /// What datapaths and health checks use.
    pub info: state::NodeInfo,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(name: &str, service: &str) -> EndpointSlice {
        let name = SliceName { namespace: "ns".into(), name: name.into() };
        EndpointSlice::new(name, ServiceName::new("ns", service), Family::V4)
    }

    #[test]
    fn a_change_of_a_copy_leaves_the_rest_shared_and_is_found() {
        let mut cluster = ClusterState::default();
        for it in 0..1_000 {
            cluster.services.insert(Service::new(ServiceName::new("ns", format!("s{it:03}"))));
            cluster.set_slice(slice(&format!("s{it:03}-1"), &format!("s{it:03}")));
        }
        let before = cluster.clone();
        let changed = slice("s500-2", "s500");
        cluster.set_slice(changed.clone());
        assert!(cluster.services.ptr_eq(&before.services) && cluster.nodes.ptr_eq(&before.nodes));
        assert!(cluster.services_with_changed_slices(&before).eq([&changed.service]));
        assert_eq!(cluster.slice(&changed.name).map(|it| &**it), Some(&changed));
        assert_eq!((before.slice(&changed.name), before.slices().count()), (None, 1_000));
        let names = before.services.values().map(|it| it.name.to_string());
        assert!(names.eq((0..1_000).map(|it| format!("ns/s{it:03}"))));
        cluster.delete_slice(&changed.name);
        assert_eq!(cluster, before);
    }

    #[test]
    fn a_slice_moves_to_a_service_with_or_without_others() {
        for others in [&[][..], &["t"]] {
            let mut cluster = ClusterState::default();
            cluster.set_slice(slice("s", "a"));
            others.iter().for_each(|it| cluster.set_slice(slice(it, "b")));
            cluster.set_slice(slice("s", "b"));
            let all = ["s"].iter().chain(others).map(|it| slice(it, "b"));
            assert!(cluster.slices().map(|it| (**it).clone()).eq(all));
            assert_eq!(cluster.slices_of(&ServiceName::new("ns", "a")).count(), 0);
            assert_eq!(cluster.slices_of(&ServiceName::new("ns", "b")).count(), 1 + others.len());
        }
    }

    #[test]
    fn a_deleted_object_leaves_no_trace() {
        let mut cluster = ClusterState::default();
        cluster.set_slice(slice("s", "a"));
        cluster.delete_slice(&slice("s", "a").name);
        cluster.nodes.insert(Node { name: "n".into(), zone: None, info: state::NodeInfo::default() });
        cluster.nodes.remove("n");
        cluster.set_service_cidr(ServiceCidr { name: "c".into(), cidrs: Vec::new() });
        assert_eq!((cluster.nodes.len(), cluster.service_cidrs.len()), (0, 1));
        cluster.delete_service_cidr("c");
        assert_eq!(cluster, ClusterState::default());
    }
}
