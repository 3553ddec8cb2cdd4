//! Assembles the selected addresses and ports of a Service into endpoints.
//!
//! Invariant: order does not matter.
//! Slices may repeat an address and list it in any order; the endpoints and their keys stay the same.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use model::state::{Endpoint, EndpointKey, EndpointPort, Scopes};
use twox_hash::XxHash64;

use crate::{
    NodeView,
    candidates::{Candidate, is_local},
};

/// A candidate that was selected for a port.
#[derive(Debug)]
pub(crate) struct SelectedPort<'a> {
    identity: Identity<'a>,
    address: IpAddr,
    port: EndpointPort,
}

/// What the addresses of one endpoint have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Identity<'a> {
    pod: Option<&'a Arc<str>>,
    local: bool,
    serving_terminating: bool,
    hostname: &'a str,
}

impl<'a> SelectedPort<'a> {
    pub(crate) fn new(candidate: &Candidate<'a>, index: u16, scopes: Scopes, node: NodeView<'_>) -> Self {
        let endpoint = candidate.endpoint;
        Self {
            identity: Identity {
                pod: endpoint.pod.as_ref(),
                local: is_local(endpoint, node),
                // An endpoint that is not ready is selected only if it is serving and terminating.
                serving_terminating: !endpoint.conditions.ready,
                hostname: &endpoint.hostname,
            },
            address: endpoint.address,
            port: EndpointPort { index, port: candidate.port, scopes },
        }
    }
}

/// The endpoints of a Service, sorted by key.
pub(crate) fn assemble(mut selected: Vec<SelectedPort<'_>>) -> Vec<Endpoint> {
    selected.sort_unstable_by_key(|it| (it.identity, it.address, it.port.index, it.port.port));
    let mut named_pods = BTreeSet::new();
    let mut endpoints = Vec::new();
    for group in selected.chunk_by(|a, b| a.identity == b.identity) {
        let Some(SelectedPort { identity, .. }) = group.first() else { continue };
        for it in dual_stack(group) {
            // A key names one endpoint: a pod's further endpoints go without its name.
            let key = match identity.pod {
                Some(pod) if named_pods.insert(pod) => EndpointKey::Pod(Arc::clone(pod)),
                _ => it.anonymous_key(),
            };
            let DualStack { v4, v6, ports } = it;
            // Most endpoints have the same, and a Service can have thousands.
            let ports = match endpoints.last() {
                Some(Endpoint { ports: same, .. }) if **same == *ports => Arc::clone(same),
                _ => ports.into(),
            };
            endpoints.push(Endpoint {
                key,
                hostname: identity.hostname.to_owned(),
                v4,
                v6,
                local: identity.local,
                serving_terminating: identity.serving_terminating,
                ports,
            });
        }
    }
    endpoints.sort_by(|a, b| a.key.cmp(&b.key));
    endpoints
}

/// The addresses of one endpoint and the ports that it serves there.
#[derive(Debug)]
struct DualStack {
    v4: Option<Ipv4Addr>,
    v6: Option<Ipv6Addr>,
    ports: Vec<EndpointPort>,
}

impl DualStack {
    /// A stable id: the hash of the addresses and target ports. The name of a pod cannot begin with `@`.
    fn anonymous_key(&self) -> EndpointKey {
        let mut text = String::new();
        for address in self.v4.map(IpAddr::V4).into_iter().chain(self.v6.map(IpAddr::V6)) {
            let _ = write!(text, "{address} ");
        }
        for port in &self.ports {
            let _ = write!(text, "{}:{} ", port.index, port.port);
        }
        EndpointKey::Anonymous(format!("@{:x}", XxHash64::oneshot(0, text.as_bytes())).into())
    }
}

/// The endpoints of one identity: an IPv4 and an IPv6 address of a pod with the same ports are one endpoint.
fn dual_stack(group: &[SelectedPort<'_>]) -> Vec<DualStack> {
    let mut found: Vec<DualStack> = Vec::new();
    for selected in group.chunk_by(|a, b| a.address == b.address) {
        let Some(SelectedPort { address, identity, .. }) = selected.first() else { continue };
        for ports in one_target_each(selected) {
            match *address {
                IpAddr::V4(v4) => found.push(DualStack { v4: Some(v4), v6: None, ports }),
                // IPv4 addresses are sorted first: if there is one with these ports, it was found already.
                IpAddr::V6(v6) => {
                    let is_pod = identity.pod.is_some();
                    match found.iter_mut().find(|it| is_pod && it.v6.is_none() && it.ports == ports) {
                        Some(twin) => twin.v6 = Some(v6),
                        None => found.push(DualStack { v4: None, v6: Some(v6), ports }),
                    }
                }
            }
        }
    }
    found
}

/// Splits the ports of one address so that each list has one target per service port: an address with two targets for
/// one port is two endpoints.
fn one_target_each(selected: &[SelectedPort<'_>]) -> Vec<Vec<EndpointPort>> {
    let mut lists: Vec<Vec<EndpointPort>> = Vec::with_capacity(1);
    for port in selected.iter().map(|it| it.port) {
        match lists.iter_mut().find(|it| it.last().is_some_and(|last| last.index < port.index)) {
            Some(list) => list.push(port),
            None => lists.push(vec![port]),
        }
    }
    lists
}
