//! What makes one state of another, operation by operation.
//!
//! The one rule: an endpoint never exists without its Service.
//! First nodes and Services are set, then anonymous endpoints deleted, pods' set, pods' deleted, anonymous ones set, and at last
//! Services and nodes deleted; what is set comes in ascending order of paths, what is deleted in descending order.

use std::{cmp::Ordering, collections::VecDeque, sync::Arc};

use model::{
    ServiceName,
    state::{Endpoint, EndpointKey, Node, NodeState, Nodes, ServiceState},
};
use prost::Message as _;
use proto::localv1::{OpItem, Ref, Set, Value, op_item::Op};
use wire::Additions;

/// The operations, made one by one: whoever is slow costs no more than the two states, and twenty bytes for each Service
/// that differs.
pub(super) struct Changes {
    additions: Additions,
    /// The Nodes that differ, in ascending order of names; if they are told of at all.
    nodes: Vec<(Arc<str>, Option<Node>)>,
    /// The Services that differ, in ascending order of paths as those of Services are compared.
    services: Vec<Change>,
    /// The same in ascending order of paths as those of endpoints are compared: a slash follows the name.
    by_endpoint: Vec<u32>,
    phase: usize,
    /// How many Services are through in this phase.
    position: usize,
    ready: VecDeque<OpItem>,
}

/// One of them at least is there.
struct Change {
    old: Option<Arc<ServiceState>>,
    new: Option<Arc<ServiceState>>,
}

const PHASES: [Phase; 8] = [
    Phase::SetNodes,
    Phase::SetServices,
    Phase::DeleteAnonymous,
    Phase::SetPods,
    Phase::DeletePods,
    Phase::SetAnonymous,
    Phase::DeleteServices,
    Phase::DeleteNodes,
];

#[derive(Clone, Copy)]
enum Phase {
    SetNodes,
    SetServices,
    DeleteAnonymous,
    SetPods,
    DeletePods,
    SetAnonymous,
    DeleteServices,
    DeleteNodes,
}

impl Changes {
    /// What makes `new` of `old`, at the cost of what differs.
    pub(super) fn new(old: &NodeState, new: &NodeState, additions: Additions) -> Self {
        let change = |(_, old, new): (&ServiceName, Option<&Arc<_>>, Option<&Arc<_>>)| Change {
            old: old.cloned(),
            new: new.cloned(),
        };
        // A thousand watchers that begin have one each: counted first, so that it is no larger than it must be.
        let mut services = Vec::with_capacity(new.diff(old).count());
        services.extend(new.diff(old).map(change));
        services.sort_by(|a, b| a.path_bytes().cmp(b.path_bytes()));
        let mut by_endpoint: Vec<_> = (0_u32..).take(services.len()).collect();
        let key = |it: &u32| services[*it as usize].path_bytes().chain(*b"/");
        by_endpoint.sort_by(|a, b| key(a).cmp(key(b)));
        let nodes = if additions.nodes { differing_nodes(&old.nodes, &new.nodes) } else { Vec::new() };
        Self { additions, nodes, services, by_endpoint, phase: 0, position: 0, ready: VecDeque::new() }
    }
}

impl Iterator for Changes {
    type Item = OpItem;

    fn next(&mut self) -> Option<OpItem> {
        loop {
            if let Some(item) = self.ready.pop_front() {
                return Some(item);
            }
            let phase = *PHASES.get(self.phase)?;
            let count = match phase {
                Phase::SetNodes | Phase::DeleteNodes => self.nodes.len(),
                _ => self.services.len(),
            };
            if self.position == count {
                (self.phase, self.position) = (self.phase + 1, 0);
                continue;
            }
            let (at, last) = (self.position, count - 1);
            self.position += 1;
            let change = match phase {
                Phase::SetNodes => {
                    let (name, node) = &self.nodes[at];
                    let bytes = node.as_ref().map(|it| wire::node(name, it).encode_to_vec());
                    self.ready.extend(bytes.map(|it| set(Set::NodesSet, name.to_string(), it)));
                    continue;
                }
                Phase::DeleteNodes => {
                    let (name, node) = &self.nodes[last - at];
                    let is_gone = node.is_none();
                    self.ready.extend(is_gone.then(|| delete(Set::NodesSet, name.to_string())));
                    continue;
                }
                Phase::SetServices => &self.services[at],
                Phase::DeleteServices => &self.services[last - at],
                Phase::SetPods | Phase::SetAnonymous => &self.services[self.by_endpoint[at] as usize],
                Phase::DeletePods | Phase::DeleteAnonymous => {
                    &self.services[self.by_endpoint[last - at] as usize]
                }
            };
            change.operations(phase, self.additions, &mut self.ready);
        }
    }
}

impl Change {
    fn name(&self) -> Option<&ServiceName> {
        self.new.as_ref().or(self.old.as_ref()).map(|it| &it.service.name)
    }

    fn path(&self) -> String {
        self.name().map(wire::service_path).unwrap_or_default()
    }

    fn endpoint_path(&self, endpoint: &Endpoint) -> String {
        self.name().map(|it| wire::endpoint_path(it, endpoint)).unwrap_or_default()
    }

    /// The path, byte by byte.
    fn path_bytes(&self) -> impl Iterator<Item = u8> {
        let parts = self.name().map(|it| it.namespace.bytes().chain(*b"/").chain(it.name.bytes()));
        parts.into_iter().flatten()
    }

    fn operations(&self, phase: Phase, additions: Additions, ready: &mut VecDeque<OpItem>) {
        match phase {
            Phase::SetServices => {
                let Some(new) = &self.new else { return };
                let is_same = self.old.as_ref().is_some_and(|old| {
                    old.service == new.service
                        && (!additions.trigger_times || old.trigger_time == new.trigger_time)
                        && (!additions.unselected || old.unselected == new.unselected)
                });
                if !is_same {
                    let bytes = wire::service_of(new, additions).encode_to_vec();
                    ready.push_back(set(Set::ServicesSet, self.path(), bytes));
                }
            }
            Phase::DeleteServices if self.new.is_none() => {
                ready.push_back(delete(Set::ServicesSet, self.path()));
            }
            Phase::DeleteServices | Phase::SetNodes | Phase::DeleteNodes => {}
            Phase::SetPods => self.set_endpoints(is_pod, ready),
            Phase::SetAnonymous => self.set_endpoints(|it| !is_pod(it), ready),
            Phase::DeletePods => self.delete_endpoints(is_pod, ready),
            Phase::DeleteAnonymous => self.delete_endpoints(|it| !is_pod(it), ready),
        }
    }

    fn set_endpoints(&self, wanted: impl Fn(&Endpoint) -> bool, ready: &mut VecDeque<OpItem>) {
        let Some(new) = &self.new else { return };
        // What an endpoint's ports are called, its Service says.
        let same_ports = self.old.as_ref().is_some_and(|old| old.service.ports == new.service.ports);
        for (old, endpoint) in self.pairs() {
            let Some(endpoint) = endpoint.filter(|it| wanted(it)) else { continue };
            if same_ports && old == Some(endpoint) {
                continue;
            }
            let message = wire::endpoint(&new.service, endpoint);
            let before = self.old.as_ref().zip(old).map(|(state, it)| wire::endpoint(&state.service, it));
            if before.as_ref() != Some(&message) {
                let path = self.endpoint_path(endpoint);
                ready.push_back(set(Set::EndpointsSet, path, message.encode_to_vec()));
            }
        }
    }

    fn delete_endpoints(&self, wanted: impl Fn(&Endpoint) -> bool, ready: &mut VecDeque<OpItem>) {
        for (old, new) in self.pairs() {
            let (Some(endpoint), None) = (old.filter(|it| wanted(it)), new) else { continue };
            let path = self.endpoint_path(endpoint);
            ready.push_front(delete(Set::EndpointsSet, path));
        }
    }

    /// The endpoints before and after, by their keys in ascending order.
    fn pairs(&self) -> impl Iterator<Item = (Option<&Endpoint>, Option<&Endpoint>)> {
        fn of(state: Option<&Arc<ServiceState>>) -> impl Iterator<Item = (&EndpointKey, &Endpoint)> {
            state.into_iter().flat_map(|it| &it.endpoints).map(|it| (&it.key, &**it))
        }
        Merge { old: of(self.old.as_ref()).peekable(), new: of(self.new.as_ref()).peekable() }
            .map(|(_, old, new)| (old, new))
    }
}

/// The nodes that differ, as they are now.
fn differing_nodes(old: &Nodes, new: &Nodes) -> Vec<(Arc<str>, Option<Node>)> {
    if old.ptr_eq(new) {
        return Vec::new();
    }
    let pairs = Merge { old: old.iter().peekable(), new: new.iter().peekable() };
    let differing = pairs.filter(|(_, old, new)| old != new);
    differing.map(|(name, _, new)| (Arc::clone(name), new.cloned())).collect()
}

fn is_pod(endpoint: &Endpoint) -> bool {
    matches!(endpoint.key, EndpointKey::Pod(_))
}

pub(super) fn set(set: Set, path: String, bytes: Vec<u8>) -> OpItem {
    OpItem { op: Some(Op::Set(Value { r#ref: Some(Ref { set: set.into(), path }), bytes })) }
}

pub(super) fn delete(set: Set, path: String) -> OpItem {
    OpItem { op: Some(Op::Delete(Ref { set: set.into(), path })) }
}

/// Joins two sorted sequences by their keys.
struct Merge<A: Iterator, B: Iterator> {
    old: std::iter::Peekable<A>,
    new: std::iter::Peekable<B>,
}

impl<'a, K: Ord + 'a, V, A, B> Iterator for Merge<A, B>
where
    A: Iterator<Item = (&'a K, V)>,
    B: Iterator<Item = (&'a K, V)>,
{
    type Item = (&'a K, Option<V>, Option<V>);

    fn next(&mut self) -> Option<Self::Item> {
        let order = match (self.old.peek(), self.new.peek()) {
            (Some((old, _)), Some((new, _))) => old.cmp(new),
            (Some(_), None) => Ordering::Less,
            (None, _) => Ordering::Greater,
        };
        match order {
            Ordering::Less => self.old.next().map(|(key, old)| (key, Some(old), None)),
            Ordering::Greater => self.new.next().map(|(key, new)| (key, None, Some(new))),
            Ordering::Equal => {
                let (key, old) = self.old.next()?;
                Some((key, Some(old), self.new.next().map(|(_, new)| new)))
            }
        }
    }
}
