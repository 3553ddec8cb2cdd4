//! Selects the endpoints that a node may use for one service port in one family.
//!
//! Invariant: each port and family is decided independently.
//! Topology hints, fallbacks and reachability of one never affect another.

use model::{
    cluster::{Endpoint, Service},
    state::{Scope, Scopes, TrafficPolicy},
};

use crate::{
    NodeView,
    candidates::{Candidate, could_serve, is_local, is_serving_terminating},
};

/// What is known of the candidates that take no part in a selection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Others {
    /// Whether one of them is ready.
    pub(crate) has_ready: bool,
    /// Whether one of them is ready on this node.
    pub(crate) has_local_ready: bool,
    /// The hints that the selection of all follows; `None` if there are no others.
    pub(crate) topology: Option<Topology>,
}

/// The result of a selection: the sets, with a membership for each candidate in the order of the candidates.
#[derive(Debug)]
pub(crate) struct Selection {
    cluster: Vec<Membership>,
    local: Vec<Membership>,
    /// The hints that the Cluster set follows.
    pub(crate) topology: Topology,
    /// Whether any candidate could serve, on any node.
    pub(crate) has_any_endpoint: bool,
    /// The policy for traffic to the cluster IP.
    internal: TrafficPolicy,
    /// The policy for traffic from outside.
    external: TrafficPolicy,
    is_external: bool,
}

/// Whether a candidate is in a set, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Membership {
    Ready,
    /// It is in: it is serving and terminating, and there is no ready one (KEP-1669).
    Fallback,
    /// It is not: it serves, but it is on another node, or the hints name others.
    Elsewhere,
    /// It is not: it is serving and terminating, and there is a ready one.
    Terminating,
    /// It is not: it does not serve.
    NotReady,
}

impl Membership {
    pub(crate) fn is_member(self) -> bool {
        matches!(self, Self::Ready | Self::Fallback)
    }
}

impl Selection {
    pub(crate) fn policy(&self, scope: Scope) -> TrafficPolicy {
        match scope {
            Scope::Internal => self.internal,
            Scope::External => self.external,
            Scope::Cluster => TrafficPolicy::Cluster,
        }
    }

    pub(crate) fn set(&self, scope: Scope) -> &[Membership] {
        match self.policy(scope) {
            TrafficPolicy::Cluster => &self.cluster,
            TrafficPolicy::Local => &self.local,
        }
    }

    /// The scopes of a candidate; most that are not ready have none.
    pub(crate) fn scopes(&self, candidate: usize) -> Scopes {
        let is_member = |scope| self.set(scope)[candidate].is_member();
        Scopes {
            internal: is_member(Scope::Internal),
            external: self.is_external && is_member(Scope::External),
            cluster: self.is_external && is_member(Scope::Cluster),
        }
    }
}

/// Selects from the candidates of one port and family.
///
/// `is_external` says whether the port has a node port, an external IP or a load balancer IP; `others` are the candidates that take
/// no part in the selection.
pub(crate) fn select(
    candidates: &[Candidate<'_>],
    service: &Service,
    is_external: bool,
    node: NodeView<'_>,
    others: Others,
) -> Selection {
    let topology = others.topology.unwrap_or_else(|| Topology::of(candidates, node));
    Selection {
        cluster: with_fallback(candidates, others.has_ready, |it| topology.accepts(it, node), |_| true),
        local: local_set(candidates, others.has_local_ready, node),
        topology,
        has_any_endpoint: candidates.iter().any(|it| could_serve(it.endpoint)),
        internal: service.internal_policy,
        external: service.external_policy,
        is_external,
    }
}

/// The Local set of the candidates of one port and family.
pub(crate) fn local_set(
    candidates: &[Candidate<'_>],
    is_ready_elsewhere: bool,
    node: NodeView<'_>,
) -> Vec<Membership> {
    let local = |it: &Endpoint| is_local(it, node);
    with_fallback(candidates, is_ready_elsewhere, local, local)
}

/// The set of the ready candidates that `ready` accepts; if there are none, here or elsewhere, of the serving terminating ones
/// that `terminating` accepts (KEP-1669).
fn with_fallback(
    candidates: &[Candidate<'_>],
    is_ready_elsewhere: bool,
    ready: impl Fn(&Endpoint) -> bool,
    terminating: impl Fn(&Endpoint) -> bool,
) -> Vec<Membership> {
    let membership = |it: &Candidate<'_>| match it.endpoint {
        it if it.conditions.ready && ready(it) => Membership::Ready,
        it if it.conditions.ready => Membership::Elsewhere,
        it if is_serving_terminating(it) => Membership::Terminating,
        _ => Membership::NotReady,
    };
    let mut set: Vec<_> = candidates.iter().map(membership).collect();
    if !is_ready_elsewhere && !set.contains(&Membership::Ready) {
        for (membership, candidate) in set.iter_mut().zip(candidates) {
            if *membership == Membership::Terminating {
                let is_accepted = terminating(candidate.endpoint);
                *membership = if is_accepted { Membership::Fallback } else { Membership::Elsewhere };
            }
        }
    }
    set
}

/// The topology hints that are used (KEP-2433, KEP-3015).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Topology {
    /// Hints for nodes.
    Node,
    /// Hints for zones.
    Zone,
    /// None: every endpoint is accepted.
    Unrestricted,
}

impl Topology {
    /// Hints are used only if every ready endpoint has one and at least one of them matches the node or its zone.
    fn of(candidates: &[Candidate<'_>], node: NodeView<'_>) -> Self {
        let ready = || candidates.iter().map(|it| it.endpoint).filter(|it| it.conditions.ready);
        if ready().all(|it| !it.node_hints().is_empty()) && ready().any(|it| matches_node(it, node)) {
            Self::Node
        } else if ready().all(|it| !it.zone_hints().is_empty()) && ready().any(|it| matches_zone(it, node)) {
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
    endpoint.node_hints().iter().any(|it| Some(&**it) == node.name)
}

pub(crate) fn matches_zone(endpoint: &Endpoint, node: NodeView<'_>) -> bool {
    endpoint.zone_hints().iter().any(|it| Some(&**it) == node.zone)
}
