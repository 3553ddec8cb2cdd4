//! Services as they are sent, and their digests: encoded once for all who follow a node that serves them alike.
//!
//! Invariant: what is shared equals what would be encoded for one client alone.

use std::{
    collections::VecDeque,
    sync::{Arc, Weak},
};

use model::state::{NodeInfos, NodeState, Pod, ServiceCidr, ServiceState};
use parking_lot::Mutex;
use prost::{Message as _, bytes::Bytes};
use proxy_contract::{
    digest::{self, Buckets, Digest, KeptBuckets},
    localv1::{Extension, OpItem, Set},
};
use wire::Extensions;

/// A Service and its endpoints as they are sent.
pub(crate) struct Encoded {
    /// The extensions that make a difference.
    content: Extensions,
    pub(crate) service: Bytes,
    /// In the order of the state.
    pub(crate) endpoints: Vec<Bytes>,
    group: GroupDigest,
    /// The operations from the previous state, which most clients had.
    change: Mutex<Option<(Weak<ServiceState>, Arc<Operations>)>>,
}

/// The operations that lead from one state of a Service to another.
pub(crate) struct Operations {
    pub(crate) set_service: Option<OpItem>,
    pub(crate) set_endpoints: VecDeque<OpItem>,
    pub(crate) delete_endpoints: VecDeque<OpItem>,
}

impl Encoded {
    /// The operations that lead here from `old`: derived once for all clients that have that.
    pub(crate) fn operations(
        &self,
        old: &Arc<ServiceState>,
        derive: impl FnOnce() -> Operations,
    ) -> Arc<Operations> {
        let mut change = self.change.lock();
        match &*change {
            // The weak reference keeps the address from being used again.
            Some((from, operations)) if from.as_ptr() == Arc::as_ptr(old) => Arc::clone(operations),
            _ => {
                let operations = Arc::new(derive());
                *change = Some((Arc::downgrade(old), Arc::clone(&operations)));
                operations
            }
        }
    }

    /// The shared encoding of a Service; `None` if it is not worth while, because only this node has this state, or another
    /// one is shared.
    pub(crate) fn shared(state: &ServiceState, extensions: Extensions) -> Option<&Self> {
        let content = content(extensions);
        let is_of_one_node = || state.endpoints.iter().any(|it| it.local);
        if state.memo.is_empty() && is_of_one_node() {
            return None;
        }
        let shared: &Self = state.memo.get_or_init(|| Self::new(state, content))?;
        (shared.content == content).then_some(shared)
    }

    fn new(state: &ServiceState, content: Extensions) -> Self {
        let path = wire::service_path(&state.service.name);
        let service = Bytes::from(wire::service_with_extensions(state, content).encode_to_vec());
        let encode = |it: &Arc<_>| Bytes::from(wire::endpoint(&state.service, it).encode_to_vec());
        let endpoints: Vec<_> = state.endpoints.iter().map(encode).collect();
        let mut digests = vec![digest::object(Set::ServicesSet, &path, &service)];
        digests.extend(state.endpoints.iter().zip(&endpoints).map(|(endpoint, bytes)| {
            digest::object(Set::EndpointsSet, &wire::endpoint_path(&state.service.name, endpoint), bytes)
        }));
        Self {
            content,
            service,
            endpoints,
            group: (digest::position(Set::ServicesSet, &path), digest::all(&mut digests)),
            change: Mutex::default(),
        }
    }
}

/// The extensions that change the message of a Service.
fn content(extensions: Extensions) -> Extensions {
    extensions.negotiate([
        Extension::TriggerTimes,
        Extension::OtherServing,
        Extension::Forwarding,
        Extension::ConflictingAddresses,
    ])
}

/// The position and the digest of each node, in the order of their names, for the nodes that were compared last.
#[derive(Default)]
pub(crate) struct NodeDigests(Mutex<Option<(NodeInfos, Arc<[GroupDigest]>)>>);

/// The position and the digest of a group.
type GroupDigest = (u32, Digest);

impl NodeDigests {
    fn of(&self, nodes: &NodeInfos) -> Arc<[GroupDigest]> {
        let mut last = self.0.lock();
        match &*last {
            Some((of, digests)) if Arc::ptr_eq(of, nodes) => Arc::clone(digests),
            _ => {
                let digests: Arc<[_]> = nodes
                    .iter()
                    .map(|(name, node)| group(Set::NodesSet, name, &wire::node(name, node).encode_to_vec()))
                    .collect();
                *last = Some((Arc::clone(nodes), Arc::clone(&digests)));
                digests
            }
        }
    }
}

/// A group of one object.
fn group(set: Set, path: &str, bytes: &[u8]) -> GroupDigest {
    (digest::position(set, path), digest::all(&mut [digest::object(set, path, bytes)]))
}

/// The part of `state` that a client has, by the digests of its buckets: the equal buckets, and the state without the others.
pub(crate) fn kept(
    state: &NodeState,
    extensions: Extensions,
    theirs: &[Digest],
    is_shared: bool,
    node_digests: &NodeDigests,
) -> (KeptBuckets, NodeState) {
    let service = |it: &Arc<_>| match is_shared.then(|| Encoded::shared(it, extensions)).flatten() {
        Some(it) => it.group,
        None => Encoded::new(it, content(extensions)).group,
    };
    let services: Vec<_> = state.services.values().map(service).collect();
    let nodes = if extensions.has(Extension::Nodes) { node_digests.of(&state.nodes) } else { Arc::default() };
    let cidr = |it: &Arc<ServiceCidr>| {
        group(Set::ServiceCidrsSet, &it.name, &wire::service_cidr(it).encode_to_vec())
    };
    let cidrs = state.service_cidrs.values().filter(|_| extensions.has(Extension::ServiceCidrs));
    let cidrs: Vec<_> = cidrs.map(cidr).collect();
    let pod = |it: &Arc<Pod>| group(Set::PodsSet, &it.name, &wire::pod(it).encode_to_vec());
    let pods: Vec<_> = state.pods.values().filter(|_| extensions.has(Extension::Pods)).map(pod).collect();
    let mut buckets = Buckets::new(theirs.len());
    for (position, digest) in services.iter().chain(&*nodes).chain(&cidrs).chain(&pods) {
        buckets.add(*position, *digest);
    }
    let kept = KeptBuckets::equal(&buckets.finish(), theirs);
    if kept.is_empty() {
        return (kept, NodeState::default());
    }
    let mut rest = state.clone();
    let is_lost = |(position, _): &GroupDigest| !kept.contains(*position);
    for ((name, _), _) in state.services.iter().zip(&services).filter(|it| is_lost(it.1)) {
        rest.services.remove(name);
    }
    for (name, _) in state.nodes.keys().zip(&*nodes).filter(|it| is_lost(it.1)) {
        Arc::make_mut(&mut rest.nodes).remove(name);
    }
    for (name, _) in state.service_cidrs.keys().zip(&cidrs).filter(|it| is_lost(it.1)) {
        Arc::make_mut(&mut rest.service_cidrs).remove(name);
    }
    for (name, _) in state.pods.keys().zip(&pods).filter(|it| is_lost(it.1)) {
        Arc::make_mut(&mut rest.pods).remove(name);
    }
    (kept, rest)
}
