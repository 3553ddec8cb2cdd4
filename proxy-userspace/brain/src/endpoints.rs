//! Assembles the selected addresses and ports of a Service into endpoints.
//!
//! Invariant: order does not matter.
//! Slices may repeat an address and list it in any order; the endpoints and their keys stay the same.

use std::{
    collections::{BTreeSet, HashMap},
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use model::{
    cluster::Endpoint,
    state::{self, EndpointKey, EndpointPort, Scopes},
};
use twox_hash::XxHash64;

use crate::{
    NodeView,
    candidates::{Candidate, is_local},
};

/// The candidates that were selected, each with the ports that it was selected for.
#[derive(Debug, Default)]
pub(crate) struct SelectedEndpoints<'a> {
    selected: Vec<SelectedEndpoint<'a>>,
    /// The position of each endpoint of a slice, by its address in memory.
    positions: HashMap<*const Endpoint, usize>,
}

#[derive(Debug)]
struct SelectedEndpoint<'a> {
    identity: Identity<'a>,
    address: IpAddr,
    /// The ports, in ascending order of index.
    ports: Vec<EndpointPort>,
}

/// What the addresses of one endpoint have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Identity<'a> {
    pod: Option<&'a Arc<str>>,
    local: bool,
    serving_terminating: bool,
    hostname: &'a str,
}

impl<'a> SelectedEndpoints<'a> {
    /// Adds a port of a candidate; ports are added in ascending order.
    pub(crate) fn add(&mut self, candidate: &Candidate<'a>, index: u16, scopes: Scopes, node: NodeView<'_>) {
        let endpoint = candidate.endpoint;
        let position = *self.positions.entry(std::ptr::from_ref(endpoint)).or_insert_with(|| {
            self.selected.push(SelectedEndpoint {
                identity: Identity {
                    pod: endpoint.pod.as_ref(),
                    local: is_local(endpoint, node),
                    // An endpoint that is not ready is selected only if it is serving and terminating.
                    serving_terminating: !endpoint.conditions.ready,
                    hostname: &endpoint.hostname,
                },
                address: endpoint.address,
                ports: Vec::new(),
            });
            self.selected.len() - 1
        });
        self.selected[position].ports.push(EndpointPort { index, port: candidate.port, scopes });
    }

    /// The endpoints of a Service, sorted by key.
    pub(crate) fn assemble(mut self) -> Vec<state::Endpoint> {
        self.selected.sort_unstable_by_key(|it| (it.identity, it.address));
        let mut named_pods = BTreeSet::new();
        let mut endpoints: Vec<state::Endpoint> = Vec::with_capacity(self.selected.len());
        for group in self.selected.chunk_by(|a, b| a.identity == b.identity) {
            let Some(SelectedEndpoint { identity, .. }) = group.first() else { continue };
            for it in dual_stack(group) {
                // A key names one endpoint: a pod's further endpoints go without its name.
                let key = match identity.pod {
                    Some(pod) if named_pods.insert(pod) => EndpointKey::Pod(Arc::clone(pod)),
                    _ => it.anonymous_key(),
                };
                let DualStack { v4, v6, ports } = it;
                // Most endpoints have the same, and a Service can have thousands.
                let ports = match endpoints.last() {
                    Some(state::Endpoint { ports: same, .. }) if **same == *ports => Arc::clone(same),
                    _ => ports.into(),
                };
                endpoints.push(state::Endpoint {
                    key,
                    hostname: identity.hostname.into(),
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
fn dual_stack(group: &[SelectedEndpoint<'_>]) -> Vec<DualStack> {
    let mut found: Vec<DualStack> = Vec::new();
    for copies in group.chunk_by(|a, b| a.address == b.address) {
        let Some(SelectedEndpoint { address, identity, .. }) = copies.first() else { continue };
        for ports in one_target_each(copies) {
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

/// Splits the ports of the copies of one address so that each list has one target per service port: an address with two
/// targets for one port is two endpoints.
fn one_target_each(copies: &[SelectedEndpoint<'_>]) -> Vec<Vec<EndpointPort>> {
    let mut ports: Vec<_> = copies.iter().flat_map(|it| &it.ports).copied().collect();
    ports.sort_unstable_by_key(|it| (it.index, it.port));
    if ports.is_sorted_by(|a, b| a.index < b.index) {
        return vec![ports];
    }
    let mut lists: Vec<Vec<EndpointPort>> = Vec::new();
    for port in ports {
        match lists.iter_mut().find(|it| it.last().is_some_and(|last| last.index < port.index)) {
            Some(list) => list.push(port),
            None => lists.push(vec![port]),
        }
    }
    lists
}
