//! From slices to candidates, and from what was chosen of them to endpoints.
//!
//! The one rule: order does not matter.
//! Slices may repeat an address, and list it in any order; the same endpoints with the same keys come out.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    num::NonZeroU16,
};

use model::{
    Family,
    facts::{self, EndpointSlice, ServicePort},
    state::{Endpoint, EndpointKey, EndpointPort, Scopes},
};
use twox_hash::XxHash64;

use crate::{NodeView, select::is_local};

/// An endpoint that stands behind one service port in one family.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<'a> {
    /// The endpoint as its slice describes it.
    pub(crate) endpoint: &'a facts::Endpoint,
    /// The port it listens on, from its own slice.
    pub(crate) target: NonZeroU16,
}

/// The candidates for a service port: each (address, target port) once, the ready copy before an unready one.
pub(crate) fn candidates<'a>(
    slices: &[&'a EndpointSlice],
    port: &ServicePort,
    family: Family,
) -> Vec<Candidate<'a>> {
    let mut found: BTreeMap<(IpAddr, NonZeroU16), &'a facts::Endpoint> = BTreeMap::new();
    for slice in slices.iter().filter(|it| it.family == family) {
        let matching = slice.ports.iter().filter(|it| it.name == port.name && it.protocol == port.protocol);
        for target in matching.map(|it| it.port) {
            for endpoint in &slice.endpoints {
                let slot = found.entry((endpoint.address, target)).or_insert(endpoint);
                if preference(endpoint) < preference(slot) {
                    *slot = endpoint;
                }
            }
        }
    }
    found.into_iter().map(|((_, target), endpoint)| Candidate { endpoint, target }).collect()
}

/// Which of two copies counts: the lesser. All fields take part, so that two copies of one rank are the same.
fn preference(endpoint: &facts::Endpoint) -> impl Ord {
    let conditions = endpoint.conditions;
    let serves = conditions.ready || (conditions.serving && conditions.terminating);
    (Reverse(conditions.ready), Reverse(serves), Reverse(endpoint.pod.is_some()), endpoint)
}

/// A candidate that was chosen for a port.
#[derive(Debug)]
pub(crate) struct Served {
    source: Source,
    address: IpAddr,
    port: EndpointPort,
}

impl Served {
    pub(crate) fn new(candidate: &Candidate<'_>, index: u16, scopes: Scopes, node: NodeView<'_>) -> Self {
        let endpoint = candidate.endpoint;
        Self {
            source: Source {
                pod: endpoint.pod.as_deref().map(Into::into),
                local: is_local(endpoint, node),
                hostname: endpoint.hostname.clone(),
            },
            address: endpoint.address,
            port: EndpointPort { index, port: candidate.target, scopes },
        }
    }
}

/// What the addresses of one endpoint have in common.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Source {
    pod: Option<String>,
    local: bool,
    hostname: String,
}

/// The endpoints of a Service, sorted by key.
pub(crate) fn assemble(served: Vec<Served>) -> Vec<Endpoint> {
    let mut found: BTreeMap<Source, PerAddress> = BTreeMap::new();
    for it in served {
        found.entry(it.source).or_default().entry(it.address).or_default().push(it.port);
    }
    let mut pods_named = std::collections::BTreeSet::new();
    let mut endpoints = Vec::new();
    for (source, addresses) in found {
        for shape in shapes(addresses, source.pod.is_some()) {
            // A path of the wire names one endpoint: whatever else a pod serves goes without its name.
            let key = match &source.pod {
                Some(pod) if pods_named.insert(pod.clone()) => EndpointKey::Pod(pod.clone()),
                _ => shape.anonymous_key(),
            };
            let Shape { v4, v6, ports } = shape;
            endpoints.push(Endpoint {
                key,
                hostname: source.hostname.clone(),
                v4,
                v6,
                local: source.local,
                ports,
            });
        }
    }
    endpoints.sort_by(|a, b| a.key.cmp(&b.key));
    endpoints
}

type PerAddress = BTreeMap<IpAddr, Vec<EndpointPort>>;

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

/// The shapes of one source; the two families of a pod become one where they serve alike.
fn shapes(addresses: PerAddress, is_pod: bool) -> Vec<Shape> {
    let mut found: Vec<Shape> = Vec::new();
    for (address, ports) in addresses {
        for ports in one_target_each(ports) {
            match address {
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
fn one_target_each(mut ports: Vec<EndpointPort>) -> Vec<Vec<EndpointPort>> {
    ports.sort_by_key(|it| (it.index, it.port));
    let mut layers: Vec<Vec<EndpointPort>> = Vec::new();
    for port in ports {
        match layers.iter_mut().find(|it| it.last().is_some_and(|last| last.index < port.index)) {
            Some(layer) => layer.push(port),
            None => layers.push(vec![port]),
        }
    }
    layers
}
