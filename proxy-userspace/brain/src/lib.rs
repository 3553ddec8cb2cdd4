//! Derives the state of a node from the state of a cluster.
//!
//! Invariant: pure.
//! The same cluster state gives the same node state; no I/O, no clock, no randomness, no kernel, no wire format.

#![forbid(unsafe_code)]

mod affected;
mod candidates;
mod endpoints;
mod explain;
mod frontends;
mod incremental;
mod node_view;
mod options;
mod select;
mod service;
mod service_view;

use std::sync::Arc;

use model::{
    PerFamily,
    cluster::ClusterState,
    conflicts::FrontendOwners,
    state::{NodeInfos, NodeState},
};

pub use explain::{
    AppliedRule, ClientKind, ExplainedClient, ExplainedEndpoint, Explanation, InvalidQuery, Query, Verdict,
    explain,
};
pub use incremental::Brain;
pub use node_view::NodeView;
pub use options::Options;
pub use service::service_state;

/// The full state of a node, derived from scratch; [`Brain`] keeps the same state up to date.
pub fn node_state(cluster: &ClusterState, node: &str, options: &Options) -> NodeState {
    let node = NodeView::new(cluster, node);
    let owners = frontend_owners(cluster, options);
    let states = cluster.services().values().filter_map(|service| {
        let slices = cluster.slices_of(&service.name).map(Arc::as_ref);
        let conflicting = owners.conflicting(&service.name);
        Some(Arc::new(service::resolved_state(
            service,
            slices,
            node,
            options,
            conflicting,
            PerFamily::default(),
        )?))
    });
    NodeState {
        services: states.collect(),
        nodes: node_infos(cluster),
        service_cidrs: Arc::clone(cluster.service_cidrs()),
        pods: Arc::clone(cluster.pods()),
    }
}

/// Which Service owns which frontend in a cluster.
fn frontend_owners(cluster: &ClusterState, options: &Options) -> FrontendOwners {
    let mut owners = FrontendOwners::default();
    for (name, service) in cluster.services() {
        owners.set(name, frontends::claim(service, options));
    }
    owners
}

/// The part of a node state that is the same for all nodes.
fn node_infos(cluster: &ClusterState) -> NodeInfos {
    cluster.nodes().iter().map(|(name, node)| (Arc::clone(name), node.info.clone())).collect()
}

#[cfg(test)]
mod tests;
