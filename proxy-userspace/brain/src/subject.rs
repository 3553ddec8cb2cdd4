//! One Service with all that its state comes from, and who can tell its states apart.
//!
//! The one rule: a node that no endpoint names, by place or by hint, sees what any such node in its zone sees.

use std::{collections::BTreeSet, sync::Arc};

use model::{
    ServiceName,
    facts::{self, Endpoint, EndpointSlice, Facts},
    state::ServiceState,
};

use crate::{
    NodeView, Options,
    claims::{Claims, Lost},
    service::contested_state,
};

/// A Service to be derived, for one node or for many.
#[derive(Debug)]
pub(crate) struct Subject<'a> {
    service: Option<&'a facts::Service>,
    slices: Vec<&'a EndpointSlice>,
    lost: Option<&'a Lost>,
    options: &'a Options,
    nodes: BTreeSet<&'a str>,
    zones: BTreeSet<&'a str>,
}

/// What a state can depend on of the node that asks: its name if an endpoint names it, its zone if a hint does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Place<'a> {
    pub(crate) node: Option<&'a str>,
    pub(crate) zone: Option<&'a str>,
}

impl<'a> Subject<'a> {
    pub(crate) fn new(
        facts: &'a Facts,
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
        Self { service, slices, lost: claims.lost(name), options, nodes, zones }
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
        let stranger;
        let name = match place.node {
            Some(name) => name,
            None => {
                stranger = self.stranger();
                &stranger
            }
        };
        let node = NodeView { name, zone: place.zone };
        contested_state(self.service?, self.slices.iter().copied(), node, self.options, self.lost)
    }

    /// A name that no endpoint names.
    fn stranger(&self) -> String {
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
