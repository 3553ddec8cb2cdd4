//! Facts in, one node's state out.
//!
//! The one rule: pure.
//! The same facts give the same state; no IO, no clock, no kernel, no wire format.

#![forbid(unsafe_code)]

mod conflicts;
mod endpoints;
mod incremental;
mod select;
mod service;
mod service_view;

use std::sync::Arc;

use model::{
    cluster::ClusterState,
    state::{NodeInfos, NodeState},
};

use conflicts::Claims;
pub use incremental::Brain;
use service::resolved_state;

pub use service::service_state;

/// What the command line says about which Services are served, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// `--service-proxy-name`: serve only the Services whose label names it; without it, only those without the label.
    pub service_proxy_name: Option<String>,
    /// Whether `spec.externalIPs` are served (deprecated by KEP-5707, on unless a flag turns it off).
    pub external_ips: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { service_proxy_name: None, external_ips: true }
    }
}

/// The node whose state is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeView<'a> {
    /// Its name: an endpoint that names it is local.
    pub name: &'a str,
    /// Its zone, if a label says so: without it, no zone hint can name it.
    pub zone: Option<&'a str>,
}

impl<'a> NodeView<'a> {
    /// What the facts say about a node. One that they do not know is served too, without a zone.
    pub fn new(facts: &'a ClusterState, name: &'a str) -> Self {
        Self { name, zone: facts.node(name).and_then(|node| node.zone.as_deref()) }
    }
}

/// The full state of the node called `node`, from scratch; [`Brain`] keeps the same up to date.
pub fn node_state(facts: &ClusterState, node: &str, options: &Options) -> NodeState {
    let node = NodeView::new(facts, node);
    let claims = Claims::of(facts, options);
    let states = facts.services().values().filter_map(|service| {
        let slices = facts.slices_of(&service.name).map(Arc::as_ref);
        let lost = claims.lost(&service.name);
        Some(Arc::new(resolved_state(service, slices, node, options, lost)?))
    });
    NodeState { services: states.collect(), nodes: nodes(facts) }
}

/// What every node's state says of all nodes.
fn nodes(facts: &ClusterState) -> NodeInfos {
    facts.nodes().iter().map(|(name, node)| (Arc::clone(name), node.info.clone())).collect()
}

#[cfg(test)]
mod tests;
