//! One Service with all that its state comes from, and who can tell its states apart.
//!
//! The one rule: a node that no endpoint names, by place or by hint, sees what any such node in its zone sees.

use std::{
    cell::OnceCell,
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use model::{
    ServiceName,
    cluster::{self, ClusterState, Endpoint, EndpointSlice},
    state::{self, ServiceState, TrafficPolicy},
};

use crate::{
    NodeView, Options,
    conflicts::{Claims, Lost},
    service::{resolved_state, trigger_time},
};

/// A Service to be derived, for one node or for many.
#[derive(Debug)]
pub(crate) struct ServiceView<'a> {
    service: Option<&'a cluster::Service>,
    slices: Vec<&'a EndpointSlice>,
    lost: Option<&'a Lost>,
    options: &'a Options,
    nodes: BTreeSet<&'a str>,
    zones: BTreeSet<&'a str>,
    endpoints_by_node: OnceCell<Option<EndpointsByNode<'a>>>,
}

/// The addresses on each node.
type EndpointsByNode<'a> = HashMap<&'a str, BTreeSet<IpAddr>>;

/// What a state can depend on of the node that asks: its name if an endpoint names it, its zone if a hint does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Place<'a> {
    pub(crate) node: Option<&'a str>,
    pub(crate) zone: Option<&'a str>,
}

impl<'a> ServiceView<'a> {
    pub(crate) fn new(
        facts: &'a ClusterState,
        claims: &'a Claims,
        name: &ServiceName,
        options: &'a Options,
    ) -> Self {
        let service = facts.service(name).map(Arc::as_ref);
        let slices: Vec<_> = match service {
            Some(_) => facts.slices_of(name).map(Arc::as_ref).collect(),
            None => Vec::new(),
        };
        let endpoints = || slices.iter().flat_map(|it| &it.endpoints);
        let nodes = endpoints().flat_map(named_nodes).collect();
        let zones = endpoints().flat_map(|it| &it.zone_hints).map(AsRef::as_ref).collect();
        Self {
            service,
            slices,
            lost: claims.lost(name),
            options,
            nodes,
            zones,
            endpoints_by_node: OnceCell::new(),
        }
    }

    /// Of a node, what this Service depends on.
    pub(crate) fn place(&self, node: &str, zone: Option<&str>) -> Place<'a> {
        Place { node: self.nodes.get(node).copied(), ..self.place_in(zone) }
    }

    /// Of a node in `zone` that no endpoint names, what this Service depends on.
    pub(crate) fn place_in(&self, zone: Option<&str>) -> Place<'a> {
        Place { node: None, zone: zone.and_then(|it| self.zones.get(it).copied()) }
    }

    /// The state there; none if the Service is not served.
    pub(crate) fn state(&self, place: Place<'_>) -> Option<ServiceState> {
        let unknown_node;
        let name = match place.node {
            Some(name) => name,
            None => {
                unknown_node = self.unknown_node();
                &unknown_node
            }
        };
        let node = NodeView { name, zone: place.zone };
        resolved_state(self.service?, self.slices.iter().copied(), node, self.options, self.lost)
    }

    /// The state at a place, from that of a node in the same zone that no endpoint names: the same result, at less cost
    /// where all that the place makes a difference to is which endpoints are local.
    pub(crate) fn state_near(
        &self,
        place: Place<'_>,
        general: Option<&Arc<ServiceState>>,
    ) -> Option<ServiceState> {
        let (Some(node), Some(general)) = (place.node, general) else { return self.state(place) };
        let Some(own) = self.only_local(node) else { return self.state(place) };
        let is_local = |it: &state::Endpoint| {
            it.v4.is_some_and(|it| own.contains(&it.into()))
                || it.v6.is_some_and(|it| own.contains(&it.into()))
        };
        let endpoints = general.endpoints.iter().map(|it| match is_local(it) {
            true => Arc::new(state::Endpoint { local: true, ..(**it).clone() }),
            false => Arc::clone(it),
        });
        Some(ServiceState {
            service: Arc::clone(&general.service),
            endpoints: endpoints.collect(),
            other_serving: Arc::clone(&general.other_serving),
            // The general state may be an older one of the same value.
            trigger_time: trigger_time(&self.slices),
        })
    }

    /// The addresses on a node, if to be local is all that sets them apart there: no policy is Local, no hint names the
    /// node, and every address and every pod is on one node only.
    fn only_local(&self, node: &str) -> Option<&BTreeSet<IpAddr>> {
        let service = self.service?;
        if [service.internal_policy, service.external_policy].contains(&TrafficPolicy::Local) {
            return None;
        }
        self.endpoints_by_node.get_or_init(|| self.find_residents()).as_ref()?.get(node)
    }

    fn find_residents(&self) -> Option<EndpointsByNode<'a>> {
        let mut endpoints_by_node = EndpointsByNode::new();
        let (mut of_address, mut of_pod) = (HashMap::new(), HashMap::new());
        let endpoints = || self.slices.iter().flat_map(|it| &it.endpoints);
        for it in endpoints() {
            let node = it.node.as_deref();
            let elsewhere = |before: Option<Option<&str>>| before.is_some_and(|before| before != node);
            if elsewhere(of_address.insert(it.address, node))
                || it.pod.as_deref().is_some_and(|pod| elsewhere(of_pod.insert(pod, node)))
            {
                return None;
            }
            if let Some(node) = node {
                endpoints_by_node.entry(node).or_default().insert(it.address);
            }
        }
        for node in endpoints().flat_map(|it| &it.node_hints) {
            endpoints_by_node.remove(&**node);
        }
        Some(endpoints_by_node)
    }

    /// A name that no endpoint names.
    fn unknown_node(&self) -> String {
        let mut name = String::new();
        while self.nodes.contains(name.as_str()) {
            name.push('?');
        }
        name
    }
}

/// The nodes that an endpoint names: where it runs, and those that should use it.
pub(crate) fn named_nodes(endpoint: &Endpoint) -> impl Iterator<Item = &str> {
    endpoint.node.iter().chain(&endpoint.node_hints).map(AsRef::as_ref)
}
