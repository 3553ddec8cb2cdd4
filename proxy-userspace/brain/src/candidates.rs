//! The endpoints of the slices that match a service port, each once.

use std::{
    cmp::Reverse,
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use model::{
    Family, Protocol,
    cluster::{Conditions, Endpoint, EndpointSlice},
    state::ServicePort,
};

use crate::NodeView;

/// An endpoint of a service port in one family.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<'a> {
    pub(crate) endpoint: &'a Endpoint,
    /// The port that it listens on, from the same slice.
    pub(crate) port: NonZeroU16,
}

impl Candidate<'_> {
    pub(crate) fn target(&self) -> SocketAddr {
        SocketAddr::new(self.endpoint.address, self.port.get())
    }
}

/// The slices of a Service by family, name and protocol of their ports, with the number: a Service can have thousands of ports.
#[derive(Debug)]
pub(crate) struct SlicesByPort<'a>(HashMap<SlicePortKey<'a>, Vec<(&'a EndpointSlice, NonZeroU16)>>);

type SlicePortKey<'a> = (Family, &'a str, Protocol);

impl<'a> SlicesByPort<'a> {
    pub(crate) fn new(slices: &[&'a EndpointSlice]) -> Self {
        let mut found: HashMap<_, Vec<_>> = HashMap::new();
        for slice in slices {
            for port in &slice.ports {
                found
                    .entry((slice.family, &*port.name, port.protocol))
                    .or_default()
                    .push((*slice, port.port));
            }
        }
        Self(found)
    }
}

/// The slices with only some of their endpoints, without those that have none of them.
pub(crate) fn with_endpoints<'a>(
    slices: impl IntoIterator<Item = &'a EndpointSlice>,
    is_in: impl Fn(&Endpoint) -> bool,
) -> Vec<EndpointSlice> {
    let slices = slices.into_iter().filter_map(|slice| {
        let endpoints: Vec<_> = slice.endpoints.iter().filter(|it| is_in(it)).cloned().collect();
        // A slice can have thousands of ports, and most slices have no such endpoint.
        (!endpoints.is_empty()).then(|| EndpointSlice {
            headless: slice.headless,
            ports: slice.ports.clone(),
            endpoints,
            ..EndpointSlice::new(slice.name.clone(), slice.service.clone(), slice.family)
        })
    });
    slices.collect()
}

/// The candidates for a service port: each target once, of several copies one that is not terminating.
pub(crate) fn candidates<'a>(
    slices: &SlicesByPort<'a>,
    port: &ServicePort,
    family: Family,
) -> Vec<Candidate<'a>> {
    let mut found: Vec<Candidate<'a>> = Vec::new();
    for &(slice, port) in slices.0.get(&(family, &*port.name, port.protocol)).into_iter().flatten() {
        found.extend(slice.endpoints.iter().map(|endpoint| Candidate { endpoint, port }));
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

/// Whether it can be in a set, on some node.
pub(crate) fn could_serve(endpoint: &Endpoint) -> bool {
    endpoint.conditions.ready || is_serving_terminating(endpoint)
}

/// Whether it runs on `node`; an endpoint without a node is never local.
pub(crate) fn is_local(endpoint: &Endpoint, node: NodeView<'_>) -> bool {
    endpoint.node.as_deref().is_some_and(|it| Some(it) == node.name)
}
