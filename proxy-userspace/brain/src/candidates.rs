//! The endpoints of the slices that match a service port, each once.

use std::{
    cmp::Reverse,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use model::{
    Family,
    cluster::{Conditions, Endpoint, EndpointSlice, ServicePort},
};

use crate::NodeView;

/// An endpoint of a service port in one family.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<'a> {
    /// The endpoint of the slice.
    pub(crate) endpoint: &'a Endpoint,
    /// The port that it listens on, from the same slice.
    pub(crate) port: NonZeroU16,
}

impl Candidate<'_> {
    /// The address and port that it listens on.
    pub(crate) fn target(&self) -> SocketAddr {
        SocketAddr::new(self.endpoint.address, self.port.get())
    }
}

/// The candidates for a service port: each target once, of several copies one that is not terminating.
pub(crate) fn candidates<'a>(
    slices: &[&'a EndpointSlice],
    port: &ServicePort,
    family: Family,
) -> Vec<Candidate<'a>> {
    let mut found: Vec<Candidate<'a>> = Vec::new();
    for slice in slices.iter().filter(|it| it.family == family) {
        let matching = slice.ports.iter().filter(|it| it.name == port.name && it.protocol == port.protocol);
        for port in matching.map(|it| it.port) {
            found.extend(slice.endpoints.iter().map(|endpoint| Candidate { endpoint, port }));
        }
    }
    let target = |it: &Candidate<'_>| -> (IpAddr, NonZeroU16) { (it.endpoint.address, it.port) };
    found.sort_unstable_by(|a, b| {
        target(a).cmp(&target(b)).then_with(|| preference(a.endpoint).cmp(&preference(b.endpoint)))
    });
    found.dedup_by(|next, first| target(next) == target(first));
    found
}

/// Of several copies of an endpoint, the one with the least preference value is used. All fields take part, so that
/// copies of equal preference are equal.
///
/// A copy that is terminating may be another pod, whose address was reused before its object was gone: as in kube-proxy's
/// `endpointslicecache.go`, any other copy counts instead of it, ready or not.
fn preference(endpoint: &Endpoint) -> impl Ord + '_ {
    let Conditions { ready, serving, terminating } = endpoint.conditions;
    (terminating, Reverse(ready), Reverse(serving), Reverse(endpoint.pod.is_some()), endpoint)
}

/// Whether it serves traffic, selected or not.
pub(crate) fn is_serving(endpoint: &Endpoint) -> bool {
    endpoint.conditions.ready || endpoint.conditions.serving
}

/// Whether it is terminating and not ready, but still serves (KEP-1669).
pub(crate) fn is_serving_terminating(endpoint: &Endpoint) -> bool {
    let conditions = endpoint.conditions;
    !conditions.ready && conditions.serving && conditions.terminating
}

/// Whether it runs on `node`; an endpoint without a node is never local.
pub(crate) fn is_local(endpoint: &Endpoint, node: NodeView<'_>) -> bool {
    endpoint.node.as_deref() == Some(node.name)
}
