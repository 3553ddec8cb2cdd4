//! Derives the state of a node from the state of a cluster.
//!
//! Invariant: pure.
//! The same cluster state gives the same node state; no I/O, no clock, no randomness, no kernel, no wire format.

#![forbid(unsafe_code)]

mod admission;
mod affected;
mod candidates;
mod endpoints;
mod explain;
mod forwarding;
mod frontends;
mod incremental;
mod node_view;
mod options;
mod select;
mod service;
mod service_view;
mod slice_index;

use std::sync::Arc;

use model::{
    PerFamily,
    cluster::{ClusterState, Node},
    state::NodeState,
};

use admission::Admission;
use node_view::NodeView;

pub use explain::{
    AppliedRule, ClientKind, ExplainedClient, ExplainedEndpoint, Explanation, InvalidQuery, Query, Verdict,
    explain,
};
pub use incremental::Brain;
pub use options::{DEFAULT_MAX_NAMESPACE_ENTRIES, Options};

/// The full state of a node, derived from scratch; [`Brain`] keeps the same state up to date.
pub fn node_state(cluster: &ClusterState, node: &str, options: &Options) -> NodeState {
    let node = NodeView::new(cluster, node);
    let admission = Admission::of(cluster, options);
    let states = cluster.services.keys().filter_map(|name| {
        let service = admission.service(cluster, name)?;
        let slices = cluster.slices_of(&service.name).map(Arc::as_ref);
        Some(Arc::new(service::service_state(
            service,
            slices,
            node,
            options,
            admission.admitted(name),
            PerFamily::default(),
        )?))
    });
    let node_info = |(name, node): (&Arc<str>, &Arc<Node>)| (Arc::clone(name), node.info.clone());
    NodeState {
        services: states.collect(),
        nodes: Arc::new(cluster.nodes.iter().map(node_info).collect()),
        service_cidrs: Arc::clone(&cluster.service_cidrs),
        pods: Arc::clone(&cluster.pods),
    }
}

#[cfg(test)]
mod tests;
