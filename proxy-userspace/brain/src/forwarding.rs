//! The ports whose packets from outside are forwarded whole: to which nodes, and what serves there.
//!
//! Invariant: whether a port is forwarded is the same on every node, since one node sends what another one has to expect.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
};

use model::{
    Family, Protocol,
    cluster::{EndpointSlice, Service},
    state::{ExternalForwarding, ForwardedPort, NodeShare, Scope, TrafficPolicy},
};

use crate::{
    NodeView, Options,
    candidates::{Candidate, SlicesByPort, candidates, could_serve, is_local, with_endpoints},
    select::{Selection, local_set},
};

/// Whether a Service can have ports that are forwarded. Under the policy Local, packets enter by a node with endpoints.
pub(crate) fn is_forwarded(service: &Service, options: &Options) -> bool {
    is_requested(service, options) && service.external_policy == TrafficPolicy::Cluster
}

/// Whether its annotation, or else the flag, asks for it.
pub(crate) fn is_requested(service: &Service, options: &Options) -> bool {
    let forwarding = service.load_balancing.external_forwarding.unwrap_or(options.external_forwarding);
    forwarding == ExternalForwarding::Dsr
}

/// Why a port of such a Service is not forwarded in a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotForwarded {
    /// No address from outside in that family is its own.
    NoAddress,
    Sctp,
    /// This endpoint is on no node.
    NoNode(SocketAddr),
    NoEndpoint,
}

/// A port of such a Service in one family, or why it is not forwarded. `service` is without the frontends that another one owns.
pub(crate) fn forwarded_port(
    service: &Service,
    index: u16,
    (family, node): (Family, NodeView<'_>),
    candidates: &[Candidate<'_>],
    selection: &Selection,
) -> Result<ForwardedPort, NotForwarded> {
    let port = &service.ports[usize::from(index)];
    if !service.has_external_ip(port, family) {
        return Err(NotForwarded::NoAddress);
    }
    if port.protocol == Protocol::Sctp {
        return Err(NotForwarded::Sctp);
    }
    let mut usable = candidates.iter().filter(|it| could_serve(it.endpoint));
    if let Some(it) = usable.find(|it| it.endpoint.node.is_none()) {
        return Err(NotForwarded::NoNode(it.target()));
    }
    let mut nodes = BTreeMap::<&Arc<str>, u32>::new();
    let members = candidates.iter().zip(selection.set(Scope::Cluster)).filter(|(_, it)| it.is_member());
    for node in members.filter_map(|(it, _)| it.endpoint.node.as_ref()) {
        *nodes.entry(node).or_default() += 1;
    }
    let share = |(node, endpoints): (&Arc<str>, _)| NodeShare { node: Arc::clone(node), endpoints };
    if nodes.is_empty() {
        return Err(NotForwarded::NoEndpoint);
    }
    Ok(ForwardedPort {
        index,
        family,
        nodes: nodes.into_iter().map(share).collect(),
        targets: local_targets(candidates, node),
    })
}

/// The ports at a node to which no hint refers, from those at the nodes of its zone that no endpoint refers to: only what serves
/// on the node differs.
pub(crate) fn at_node(
    node: NodeView<'_>,
    of_zone: &Arc<[ForwardedPort]>,
    service: &Service,
    slices: &[&EndpointSlice],
) -> Arc<[ForwardedPort]> {
    if of_zone.is_empty() {
        return Arc::clone(of_zone);
    }
    let served = || slices.iter().filter(|it| !it.headless).copied();
    let local = served().flat_map(|it| &it.endpoints).filter(|it| is_local(it, node));
    let addresses: BTreeSet<_> = local.map(|it| it.address).collect();
    // A copy of an address on another node may be preferred.
    let slices = with_endpoints(served(), |it| addresses.contains(&it.address));
    let slices: Vec<_> = slices.iter().collect();
    let by_port = SlicesByPort::new(&slices);
    let ports = of_zone.iter().map(|it| {
        let candidates = candidates(&by_port, &service.ports[usize::from(it.index)], it.family);
        ForwardedPort { targets: local_targets(&candidates, node), ..it.clone() }
    });
    ports.collect()
}

/// The targets of the Local set, in the order of the candidates.
fn local_targets(candidates: &[Candidate<'_>], node: NodeView<'_>) -> Arc<[SocketAddr]> {
    let set = local_set(candidates, false, node);
    let members = candidates.iter().zip(set).filter(|(_, it)| it.is_member());
    members.map(|(it, _)| it.target()).collect()
}
