//! Selects the endpoints that a node may use for one service port in one family.
//!
//! Invariant: each port and family is decided independently.
//! Topology hints, fallbacks and reachability of one never affect another.

use model::{
    cluster::Endpoint,
    state::{Scopes, TrafficPolicy},
};

use crate::{
    NodeView,
    candidates::{Candidate, is_local, is_serving_terminating},
};

/// What the selection depends on, besides the candidates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Criteria<'a> {
    /// The policy for traffic to the cluster IP.
    pub(crate) internal: TrafficPolicy,
    /// The policy for traffic from outside.
    pub(crate) external: TrafficPolicy,
    /// Whether the port has a node port, an external IP or a load balancer IP.
    pub(crate) is_external: bool,
    /// The node whose state is derived.
    pub(crate) node: NodeView<'a>,
}

/// The result of a selection.
#[derive(Debug)]
pub(crate) struct Selection {
    /// The scopes of each candidate, in the order of the candidates; most that are not ready have none.
    pub(crate) scopes: Vec<Scopes>,
    /// Whether any candidate could serve, on any node.
    pub(crate) has_any_endpoint: bool,
}

/// Selects from the candidates of one port and family.
pub(crate) fn select(candidates: &[Candidate<'_>], criteria: &Criteria<'_>) -> Selection {
    let local = |it: &Endpoint| is_local(it, criteria.node);
    let topology = Topology::of(candidates, criteria.node);
    let cluster = with_fallback(candidates, |it| topology.accepts(it, criteria.node), |_| true);
    let local = with_fallback(candidates, local, local);
    let set = |policy| match policy {
        TrafficPolicy::Cluster => &cluster,
        TrafficPolicy::Local => &local,
    };
    let (internal, external) = (set(criteria.internal), set(criteria.external));
    let scopes = (0..candidates.len()).map(|index| Scopes {
        internal: internal[index],
        external: criteria.is_external && external[index],
        cluster: criteria.is_external && cluster[index],
    });
    let could_serve = |it: &Endpoint| it.conditions.ready || is_serving_terminating(it);
    Selection {
        scopes: scopes.collect(),
        has_any_endpoint: candidates.iter().any(|it| could_serve(it.endpoint)),
    }
}

/// The ready candidates that `ready` accepts; if there are none, the serving terminating ones that `terminating`
/// accepts (KEP-1669).
fn with_fallback(
    candidates: &[Candidate<'_>],
    ready: impl Fn(&Endpoint) -> bool,
    terminating: impl Fn(&Endpoint) -> bool,
) -> Vec<bool> {
    let selected: Vec<_> =
        candidates.iter().map(|it| it.endpoint.conditions.ready && ready(it.endpoint)).collect();
    if selected.contains(&true) {
        return selected;
    }
    candidates.iter().map(|it| is_serving_terminating(it.endpoint) && terminating(it.endpoint)).collect()
}

/// The topology hints that are used (KEP-2433, KEP-3015).
#[derive(Clone, Copy, Debug)]
enum Topology {
    /// Those for nodes.
    Node,
    /// Those for zones.
    Zone,
    /// None: every endpoint is accepted.
    Unrestricted,
}

impl Topology {
    /// Hints are used only if every ready endpoint has one and at least one of them matches the node or its zone.
    fn of(candidates: &[Candidate<'_>], node: NodeView<'_>) -> Self {
        let ready = || candidates.iter().map(|it| it.endpoint).filter(|it| it.conditions.ready);
        if ready().all(|it| !it.node_hints.is_empty()) && ready().any(|it| matches_node(it, node)) {
            Self::Node
        } else if ready().all(|it| !it.zone_hints.is_empty()) && ready().any(|it| matches_zone(it, node)) {
            Self::Zone
        } else {
            Self::Unrestricted
        }
    }

    fn accepts(self, endpoint: &Endpoint, node: NodeView<'_>) -> bool {
        match self {
            Self::Node => matches_node(endpoint, node),
            Self::Zone => matches_zone(endpoint, node),
            Self::Unrestricted => true,
        }
    }
}

fn matches_node(endpoint: &Endpoint, node: NodeView<'_>) -> bool {
    endpoint.node_hints.iter().any(|it| &**it == node.name)
}

fn matches_zone(endpoint: &Endpoint, node: NodeView<'_>) -> bool {
    endpoint.zone_hints.iter().any(|it| Some(&**it) == node.zone)
}
