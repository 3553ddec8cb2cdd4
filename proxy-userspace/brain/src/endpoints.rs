//! From slices to candidates, and from what was chosen of them to endpoints.
//!
//! The one rule: order does not matter.
//! Slices may repeat an address, and list it in any order; the same endpoints with the same keys come out.

use std::{
    cmp::Reverse,
    collections::BTreeSet,
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    num::NonZeroU16,
};

use model::{
    Family,
    cluster::{self, EndpointSlice, ServicePort},
    state::{Endpoint, EndpointKey, EndpointPort, Scopes},
};
use twox_hash::XxHash64;

use crate::{NodeView, select::is_local};

/// An endpoint that stands behind one service port in one family.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<'a> {
    /// The endpoint as its slice describes it.
    pub(crate) endpoint: &'a cluster::Endpoint,
    /// The port it listens on, from its own slice.
    pub(crate) target: NonZeroU16,
}

impl Candidate<'_> {
    /// Where it listens.
    pub(crate) fn place(&self) -> SocketAddr {
        SocketAddr::new(self.endpoint.address, self.target.get())
    }
}

/// The candidates for a service port: each (address, target port) once, the ready copy before an unready one.
pub(crate) fn candidates<'a>(
    slices: &[&'a EndpointSlice],
    port: &ServicePort,
    family: Family,
) -> Vec<Candidate<'a>> {
    let mut found: Vec<Candidate<'a>> = Vec::new();
    for slice in slices.iter().filter(|it| it.family == family) {
        let matching = slice.ports.iter().filter(|it| it.name == port.name && it.protocol == port.protocol);
        for target in matching.map(|it| it.port) {
            found.extend(slice.endpoints.iter().map(|endpoint| Candidate { endpoint, target }));
        }
    }
    let place = |it: &Candidate<'_>| (it.endpoint.address, it.target);
    found.sort_unstable_by(|a, b| {
        place(a).cmp(&place(b)).then_with(|| preference(a.endpoint).cmp(&preference(b.endpoint)))
    });
    found.dedup_by(|next, first| place(next) == place(first));
    found
}

/// Which of two copies counts: the lesser. All fields take part, so that two copies of one rank are the same.
fn preference(endpoint: &cluster::Endpoint) -> impl Ord + '_ {
    let conditions = endpoint.conditions;
    let serves = conditions.ready || (conditions.serving && conditions.terminating);
    (Reverse(conditions.ready), Reverse(serves), Reverse(endpoint.pod.is_some()), endpoint)
}

/// A candidate that was chosen for a port.
#[derive(Debug)]
pub(crate) struct Served<'a> {
    source: Source<'a>,
    address: IpAddr,
    port: EndpointPort,
}

impl<'a> Served<'a> {
    pub(crate) fn new(candidate: &Candidate<'a>, index: u16, scopes: Scopes, node: NodeView<'_>) -> Self {
        let endpoint = candidate.endpoint;
        Self {
            source: Source {
                pod: endpoint.pod.as_deref(),
                local: is_local(endpoint, node),
                // It was chosen all the same: nobody else is left.
                serving_terminating: !endpoint.conditions.ready,
                hostname: &endpoint.hostname,
            },
            address: endpoint.address,
            port: EndpointPort { index, port: candidate.target, scopes },
        }
    }
}

/// What the addresses of one endpoint have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Source<'a> {
    pod: Option<&'a str>,
    local: bool,
    serving_terminating: bool,
    hostname: &'a str,
}

/// The endpoints of a Service, sorted by key.
pub(crate) fn assemble(mut served: Vec<Served<'_>>) -> Vec<Endpoint> {
    served.sort_unstable_by_key(|it| (it.source, it.address, it.port.index, it.port.port));
    let mut pods_named = BTreeSet::new();
    let mut endpoints = Vec::new();
    for group in served.chunk_by(|a, b| a.source == b.source) {
        let Some(Served { source, .. }) = group.first() else { continue };
        for shape in shapes(group) {
            // A path of the wire names one endpoint: whatever else a pod serves goes without its name.
            let key = match source.pod {
                Some(pod) if pods_named.insert(pod) => EndpointKey::Pod(pod.to_owned()),
                _ => shape.anonymous_key(),
            };
            let Shape { v4, v6, ports } = shape;
            endpoints.push(Endpoint {
                key,
                hostname: source.hostname.to_owned(),
                v4,
                v6,
                local: source.local,
                serving_terminating: source.serving_terminating,
                ports,
            });
        }
    }
    endpoints.sort_by(|a, b| a.key.cmp(&b.key));
    endpoints
}

/// Addresses and the ports that are served there.
#[derive(Debug)]
struct Shape {
    v4: Option<Ipv4Addr>,
    v6: Option<Ipv6Addr>,
    ports: Vec<EndpointPort>,
}

impl Shape {
    /// A stable id: the hash of the addresses and target ports. A pod's name cannot begin like it.
    fn anonymous_key(&self) -> EndpointKey {
        let mut text = String::new();
        for address in self.v4.map(IpAddr::V4).into_iter().chain(self.v6.map(IpAddr::V6)) {
            let _ = write!(text, "{address} ");
        }
        for port in &self.ports {
            let _ = write!(text, "{}:{} ", port.index, port.port);
        }
        EndpointKey::Anonymous(format!("@{:x}", XxHash64::oneshot(0, text.as_bytes())))
    }
}

/// The shapes of one source, from what it serves in order; the two families of a pod become one where they serve alike.
fn shapes(group: &[Served<'_>]) -> Vec<Shape> {
    let mut found: Vec<Shape> = Vec::new();
    for served in group.chunk_by(|a, b| a.address == b.address) {
        let Some(Served { address, source, .. }) = served.first() else { continue };
        let is_pod = source.pod.is_some();
        for ports in one_target_each(served) {
            match *address {
                IpAddr::V4(v4) => found.push(Shape { v4: Some(v4), v6: None, ports }),
                // IPv4 comes first in the order of addresses: the twin, if there is one, is there already.
                IpAddr::V6(v6) => {
                    let twin = found.iter_mut().find(|it| is_pod && it.v6.is_none() && it.ports == ports);
                    match twin {
                        Some(twin) => twin.v6 = Some(v6),
                        None => found.push(Shape { v4: None, v6: Some(v6), ports }),
                    }
                }
            }
        }
    }
    found
}

/// An endpoint has one target per service port: an address with two for one port is two endpoints.
fn one_target_each(served: &[Served<'_>]) -> impl Iterator<Item = Vec<EndpointPort>> {
    let ports = || served.iter().map(|it| it.port);
    let is_one = served.is_sorted_by(|a, b| a.port.index < b.port.index);
    let mut layers: Vec<Vec<EndpointPort>> = Vec::new();
    for port in ports().filter(|_| !is_one) {
        match layers.iter_mut().find(|it| it.last().is_some_and(|last| last.index < port.index)) {
            Some(layer) => layer.push(port),
            None => layers.push(vec![port]),
        }
    }
    is_one.then(|| ports().collect()).into_iter().chain(layers)
}
