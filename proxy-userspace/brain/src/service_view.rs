//! One Service with all that its state depends on, and the nodes on which its state can differ.
//!
//! Invariant: all nodes of a zone that no endpoint of a Service refers to, by its node or by a hint, get the same
//! state.

use std::{
    cell::OnceCell,
    collections::{BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use model::{
    Family, PerFamily, ServiceName,
    cluster::{ClusterState, Endpoint, EndpointSlice, Service},
    state::{self, ForwardedPort, Memo, ServiceState, TrafficPolicy},
};

use crate::{
    NodeView, Options,
    admission::{Admission, Admitted},
    affected::Affected,
    forwarding::{self, is_forwarded},
    service::{service_state, trigger_time},
};

/// A Service whose state is to be derived, for one node or for many.
#[derive(Debug)]
pub(crate) struct ServiceView<'a> {
    service: Option<&'a Service>,
    pub(crate) slices: Vec<&'a EndpointSlice>,
    admitted: Admitted<'a>,
    options: &'a Options,
    /// The nodes that an endpoint refers to, once they are collected.
    nodes: Option<HashSet<&'a str>>,
    /// The zones of the hints, once one is asked for.
    zones: OnceCell<BTreeSet<&'a str>>,
    endpoints_by_node: OnceCell<Option<EndpointsByNode<'a>>>,
}

type EndpointsByNode<'a> = HashMap<&'a str, BTreeSet<IpAddr>>;

impl<'a> ServiceView<'a> {
    pub(crate) fn new(
        cluster: &'a ClusterState,
        admission: &'a Admission,
        name: &ServiceName,
        options: &'a Options,
    ) -> Self {
        let service = admission.service(cluster, name).map(Arc::as_ref);
        let slices: Vec<_> = match service {
            Some(_) => cluster.slices_of(name).map(Arc::as_ref).collect(),
            None => Vec::new(),
        };
        let admitted = admission.admitted(name);
        Self {
            service,
            slices,
            admitted,
            options,
            nodes: None,
            zones: OnceCell::new(),
            endpoints_by_node: OnceCell::new(),
        }
    }

    /// Collects the nodes that an endpoint refers to, as many of them are asked for.
    pub(crate) fn for_many_nodes(mut self) -> Self {
        self.nodes = Some(self.referenced_nodes().collect());
        self
    }

    fn referenced_nodes(&self) -> impl Iterator<Item = &'a str> + use<'a, '_> {
        self.slices.iter().flat_map(|it| &it.endpoints).flat_map(referenced_nodes)
    }

    /// A node, if an endpoint refers to it.
    fn referenced(&self, node: &str) -> Option<&'a str> {
        match &self.nodes {
            Some(nodes) => nodes.get(node).copied(),
            None => self.referenced_nodes().find(|it| *it == node),
        }
    }

    /// A node as far as the state depends on it: by its name if an endpoint refers to it, by its zone if a hint names it.
    pub(crate) fn node(&self, node: &str, zone: Option<&str>) -> NodeView<'a> {
        NodeView { name: self.referenced(node), ..self.unreferenced_node(zone) }
    }

    /// The nodes in `zone` that no endpoint refers to.
    pub(crate) fn unreferenced_node(&self, zone: Option<&str>) -> NodeView<'a> {
        NodeView { name: None, zone: zone.and_then(|it| self.zones().get(it).copied()) }
    }

    fn zones(&self) -> &BTreeSet<&'a str> {
        let endpoints = || self.slices.iter().flat_map(|it| &it.endpoints);
        self.zones.get_or_init(|| endpoints().flat_map(Endpoint::zone_hints).map(AsRef::as_ref).collect())
    }

    /// The state at a node; none if the Service is not served.
    pub(crate) fn state(&self, node: NodeView<'_>) -> Option<ServiceState> {
        let slices = self.slices.iter().copied();
        service_state(self.service?, slices, node, self.options, self.admitted, PerFamily::default())
    }

    /// The state at a node, given the state there before the change of some endpoints; `None` if all must be derived again.
    ///
    /// At a node that an endpoint refers to, `similar` is the state of the nodes in the same zone that none refers to.
    pub(crate) fn changed_state(
        &self,
        node: NodeView<'_>,
        affected: &Affected<'_>,
        before: &ServiceState,
        similar: Option<&ServiceState>,
    ) -> Option<ServiceState> {
        let service = self.service?;
        let forwarded = match (node.name, similar) {
            _ if !is_forwarded(service, self.options) || self.admitted.is_translated => Arc::default(),
            (Some(_), Some(zone_state)) => self.forwarded(node, zone_state),
            // The endpoints of each node are counted again.
            _ => return None,
        };
        let state = affected.state(service, node, before, similar, |slices, others| {
            service_state(service, slices, node, self.options, self.admitted, others)
        });
        Some(ServiceState { forwarded, ..state? })
    }

    /// What is forwarded at a node, from the state of the nodes in the same zone that no endpoint refers to.
    fn forwarded(&self, node: NodeView<'_>, zone_state: &ServiceState) -> Arc<[ForwardedPort]> {
        let at = |service| forwarding::at_node(node, &zone_state.forwarded, service, &self.slices);
        self.service.map(at).unwrap_or_default()
    }

    /// The state at a node, given the state of the nodes in the same zone that no endpoint refers to: the same
    /// result as [`state`](Self::state), cheaper if the two differ only in which endpoints are local.
    pub(crate) fn state_from(
        &self,
        node: NodeView<'_>,
        zone_state: Option<&Arc<ServiceState>>,
    ) -> Option<ServiceState> {
        let (Some(name), Some(zone_state)) = (node.name, zone_state) else {
            return self.state(node);
        };
        let Some(own) = self.local_addresses(name) else { return self.state(node) };
        let is_local = |it: &state::Endpoint| {
            Family::ALL.iter().any(|family| it.address(*family).is_some_and(|it| own.contains(&it)))
        };
        let endpoints = zone_state.endpoints.iter().map(|it| match is_local(it) {
            true => Arc::new(state::Endpoint { local: true, ..(**it).clone() }),
            false => Arc::clone(it),
        });
        Some(ServiceState {
            service: Arc::clone(&zone_state.service),
            endpoints: endpoints.collect(),
            other_serving: Arc::clone(&zone_state.other_serving),
            not_serving: Arc::clone(&zone_state.not_serving),
            forwarded: self.forwarded(node, zone_state),
            // `zone_state` may be an equal state of an earlier time.
            trigger_time: trigger_time(&self.slices),
            memo: Memo::default(),
        })
    }

    /// The addresses on a node, if nothing differs there but which endpoints are local: no policy is Local, no hint names
    /// the node, and every address and every pod is on one node only.
    fn local_addresses(&self, node: &str) -> Option<&BTreeSet<IpAddr>> {
        let service = self.service?;
        if [service.internal_policy, service.external_policy].contains(&TrafficPolicy::Local) {
            return None;
        }
        self.endpoints_by_node.get_or_init(|| self.find_endpoints_by_node()).as_ref()?.get(node)
    }

    fn find_endpoints_by_node(&self) -> Option<EndpointsByNode<'a>> {
        let mut by_node = EndpointsByNode::new();
        let (mut of_address, mut of_pod) = (HashMap::new(), HashMap::new());
        let endpoints = || self.slices.iter().flat_map(|it| &it.endpoints);
        for it in endpoints() {
            let node = it.node.as_deref();
            let is_elsewhere = |before: Option<Option<&str>>| before.is_some_and(|before| before != node);
            if is_elsewhere(of_address.insert(it.address, node))
                || it.pod.as_deref().is_some_and(|pod| is_elsewhere(of_pod.insert(pod, node)))
            {
                return None;
            }
            if let Some(node) = node {
                by_node.entry(node).or_default().insert(it.address);
            }
        }
        for node in endpoints().flat_map(Endpoint::node_hints) {
            by_node.remove(&**node);
        }
        Some(by_node)
    }
}

/// The nodes that an endpoint refers to: its own and those of its hints.
pub(crate) fn referenced_nodes(endpoint: &Endpoint) -> impl Iterator<Item = &str> {
    endpoint.node.iter().chain(endpoint.node_hints()).map(AsRef::as_ref)
}
