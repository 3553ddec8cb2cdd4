//! Which endpoints of one service port, in one family, this node may use for which traffic.
//!
//! The one rule: a port and a family decide for themselves.
//! Hints, fallbacks and reachability of one never touch another.

use model::{
    cluster::Endpoint,
    state::{Scopes, TrafficPolicy},
};

use crate::{NodeView, endpoints::Candidate};

/// What a service port asks about its endpoints.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question<'a> {
    /// The policy for traffic to the cluster IP.
    pub(crate) internal: TrafficPolicy,
    /// The policy for traffic from outside.
    pub(crate) external: TrafficPolicy,
    /// Whether it has a node port, an external IP or a load balancer IP.
    pub(crate) from_outside: bool,
    /// The node that asks.
    pub(crate) node: NodeView<'a>,
}

/// The answer, for the candidates in their order.
#[derive(Debug)]
pub(crate) struct Answer {
    /// What each may be used for; nothing, for most that are not ready.
    pub(crate) scopes: Vec<Scopes>,
    /// Whether some candidate could serve, on some node.
    pub(crate) has_any_endpoint: bool,
}

/// Decides.
pub(crate) fn select(candidates: &[Candidate<'_>], question: &Question<'_>) -> Answer {
    let local = |it: &Endpoint| is_local(it, question.node);
    let cluster = topology(candidates, question.node);
    let cluster = with_fallback(candidates, |it| cluster.keeps(it, question.node), |_| true);
    let local = with_fallback(candidates, local, local);
    let set = |policy| match policy {
        TrafficPolicy::Cluster => &cluster,
        TrafficPolicy::Local => &local,
    };
    let (internal, external) = (set(question.internal), set(question.external));
    let scopes = (0..candidates.len()).map(|index| Scopes {
        internal: internal[index],
        external: question.from_outside && external[index],
        cluster: question.from_outside && cluster[index],
    });
    let has_any_endpoint =
        candidates.iter().any(|it| it.endpoint.conditions.ready || is_leaving(it.endpoint));
    Answer { scopes: scopes.collect(), has_any_endpoint }
}

/// The ready candidates that `ready` accepts; if there are none, those that serve although they are going away
/// (KEP-1669) and that `leaving` accepts.
fn with_fallback(
    candidates: &[Candidate<'_>],
    ready: impl Fn(&Endpoint) -> bool,
    leaving: impl Fn(&Endpoint) -> bool,
) -> Vec<bool> {
    let chosen: Vec<_> =
        candidates.iter().map(|it| it.endpoint.conditions.ready && ready(it.endpoint)).collect();
    if chosen.contains(&true) {
        return chosen;
    }
    candidates.iter().map(|it| is_leaving(it.endpoint) && leaving(it.endpoint)).collect()
}

/// Not ready, serving and terminating.
fn is_leaving(endpoint: &Endpoint) -> bool {
    let conditions = endpoint.conditions;
    !conditions.ready && conditions.serving && conditions.terminating
}

/// Whether it answers, chosen or not.
pub(crate) fn serves(endpoint: &Endpoint) -> bool {
    endpoint.conditions.ready || endpoint.conditions.serving
}

/// An endpoint whose node is not known is never local.
pub(crate) fn is_local(endpoint: &Endpoint, node: NodeView<'_>) -> bool {
    endpoint.node.as_deref() == Some(node.name)
}

/// Which hints count (KEP-2433, KEP-3015).
#[derive(Clone, Copy, Debug)]
enum Topology {
    /// Those for nodes.
    Node,
    /// Those for zones.
    Zone,
    /// None: every endpoint is used.
    All,
}

impl Topology {
    fn keeps(self, endpoint: &Endpoint, node: NodeView<'_>) -> bool {
        match self {
            Self::Node => names_node(endpoint, node),
            Self::Zone => names_zone(endpoint, node),
            Self::All => true,
        }
    }
}

/// Hints count only if every ready endpoint has one and at least one of them names this node, or its zone.
fn topology(candidates: &[Candidate<'_>], node: NodeView<'_>) -> Topology {
    let ready = || candidates.iter().map(|it| it.endpoint).filter(|it| it.conditions.ready);
    if ready().all(|it| !it.node_hints.is_empty()) && ready().any(|it| names_node(it, node)) {
        Topology::Node
    } else if ready().all(|it| !it.zone_hints.is_empty()) && ready().any(|it| names_zone(it, node)) {
        Topology::Zone
    } else {
        Topology::All
    }
}

fn names_node(endpoint: &Endpoint, node: NodeView<'_>) -> bool {
    endpoint.node_hints.iter().any(|it| &**it == node.name)
}

fn names_zone(endpoint: &Endpoint, node: NodeView<'_>) -> bool {
    endpoint.zone_hints.iter().any(|it| Some(&**it) == node.zone)
}
