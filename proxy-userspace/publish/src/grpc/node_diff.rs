//! What makes one state of another, operation by operation.
//!
//! The one rule: an endpoint never exists without its Service.
//! First nodes and Services are set, then anonymous endpoints deleted, pods' set, pods' deleted, anonymous ones set, and at last
//! Services and nodes deleted; what is set comes in ascending order of paths, what is deleted in descending order.

use std::{collections::VecDeque, sync::Arc};

use model::{
    ServiceName, diff,
    services::Services,
    state::{Endpoint, EndpointKey, NodeInfo, NodeInfos, NodeState, ServiceState},
};
use prost::Message as _;
use proxy_contract::localv1::{OpItem, Ref, Set, Value, op_item::Op};
use wire::Extensions;

/// The operations, made one by one: whoever is slow costs no more than the two states, and a word for each Service that
/// differs.
pub(super) struct NodeDiff {
    additions: Extensions,
    /// The Nodes that differ, in ascending order of names; if they are told of at all.
    nodes: Vec<(Arc<str>, Option<NodeInfo>)>,
    old: Services,
    new: Services,
    /// The Services that differ, as they are now or else as they were, in the order of the phase.
    differing: Vec<Arc<ServiceState>>,
    phase: usize,
    /// How many Services are through in this phase.
    position: usize,
    ready: VecDeque<OpItem>,
}

/// What becomes of one Service.
struct Change<'a> {
    name: &'a ServiceName,
    old: Option<&'a Arc<ServiceState>>,
    new: Option<&'a Arc<ServiceState>>,
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

impl NodeDiff {
    /// What makes `new` of `old`, at the cost of what differs.
    pub(super) fn new(old: &NodeState, new: &NodeState, additions: Extensions) -> Self {
        // A thousand watchers that begin have one each: counted first, so that it is no larger than it must be.
        let mut differing = Vec::with_capacity(new.diff(old).count());
        differing.extend(new.diff(old).filter_map(|(_, old, new)| new.or(old).cloned()));
        let nodes = if additions.nodes { differing_nodes(&old.nodes, &new.nodes) } else { Vec::new() };
        Self {
            additions,
            nodes,
            old: old.services.clone(),
            new: new.services.clone(),
            differing,
            phase: 0,
            position: 0,
            ready: VecDeque::new(),
        }
    }

    /// Brings the Services into ascending order of paths, as those of Services are compared or as those of endpoints are: a
    /// slash follows the name.
    fn sort_for(&mut self, phase: Phase) {
        match phase {
            Phase::SetServices | Phase::DeleteServices => {
                self.differing.sort_by(|a, b| path(a).cmp(path(b)));
            }
            Phase::DeleteAnonymous => {
                self.differing.sort_by(|a, b| path(a).chain(*b"/").cmp(path(b).chain(*b"/")));
            }
            // The order of the phase before is right, or there is no Service in it.
            Phase::SetPods
            | Phase::DeletePods
            | Phase::SetAnonymous
            | Phase::SetNodes
            | Phase::DeleteNodes => {}
        }
    }
}

impl Iterator for NodeDiff {
    type Item = OpItem;

    fn next(&mut self) -> Option<OpItem> {
        loop {
            if let Some(item) = self.ready.pop_front() {
                return Some(item);
            }
            let phase = *PHASES.get(self.phase)?;
            let count = match phase {
                Phase::SetNodes | Phase::DeleteNodes => self.nodes.len(),
                _ => self.differing.len(),
            };
            if self.position == count {
                (self.phase, self.position) = (self.phase + 1, 0);
                continue;
            }
            if self.position == 0 {
                self.sort_for(phase);
            }
            let (at, last) = (self.position, count - 1);
            self.position += 1;
            let service = match phase {
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
                Phase::SetServices | Phase::SetPods | Phase::SetAnonymous => &self.differing[at],
                Phase::DeleteServices | Phase::DeletePods | Phase::DeleteAnonymous => {
                    &self.differing[last - at]
                }
            };
            let name = &service.service.name;
            let change = Change { name, old: self.old.get(name), new: self.new.get(name) };
            change.operations(phase, self.additions, &mut self.ready);
        }
    }
}

/// The path, byte by byte.
fn path(service: &ServiceState) -> impl Iterator<Item = u8> {
    let ServiceName { namespace, name } = &service.service.name;
    namespace.bytes().chain(*b"/").chain(name.bytes())
}

impl Change<'_> {
    fn operations(&self, phase: Phase, additions: Extensions, ready: &mut VecDeque<OpItem>) {
        match phase {
            Phase::SetServices => {
                let Some(new) = self.new else { return };
                let is_same = self.old.is_some_and(|old| {
                    old.service == new.service
                        && (!additions.trigger_times || old.trigger_time == new.trigger_time)
                        && (!additions.other_serving || old.other_serving == new.other_serving)
                });
                if !is_same {
                    let bytes = wire::service_with_extensions(new, additions).encode_to_vec();
                    ready.push_back(set(Set::ServicesSet, wire::service_path(self.name), bytes));
                }
            }
            Phase::DeleteServices if self.new.is_none() => {
                ready.push_back(delete(Set::ServicesSet, wire::service_path(self.name)));
            }
            Phase::DeleteServices | Phase::SetNodes | Phase::DeleteNodes => {}
            Phase::SetPods => self.set_endpoints(is_pod, ready),
            Phase::SetAnonymous => self.set_endpoints(|it| !is_pod(it), ready),
            Phase::DeletePods => self.delete_endpoints(is_pod, ready),
            Phase::DeleteAnonymous => self.delete_endpoints(|it| !is_pod(it), ready),
        }
    }

    fn set_endpoints(&self, wanted: impl Fn(&Endpoint) -> bool, ready: &mut VecDeque<OpItem>) {
        let Some(new) = self.new else { return };
        // What an endpoint's ports are called, its Service says.
        let same_ports = self.old.is_some_and(|old| old.service.ports == new.service.ports);
        for (old, endpoint) in self.pairs() {
            let Some(endpoint) = endpoint.filter(|it| wanted(it)) else { continue };
            if same_ports && old == Some(endpoint) {
                continue;
            }
            let message = wire::endpoint(&new.service, endpoint);
            let before = self.old.zip(old).map(|(state, it)| wire::endpoint(&state.service, it));
            if before.as_ref() != Some(&message) {
                let path = wire::endpoint_path(self.name, endpoint);
                ready.push_back(set(Set::EndpointsSet, path, message.encode_to_vec()));
            }
        }
    }

    fn delete_endpoints(&self, wanted: impl Fn(&Endpoint) -> bool, ready: &mut VecDeque<OpItem>) {
        for (old, new) in self.pairs() {
            let (Some(endpoint), None) = (old.filter(|it| wanted(it)), new) else { continue };
            let path = wire::endpoint_path(self.name, endpoint);
            ready.push_front(delete(Set::EndpointsSet, path));
        }
    }

    /// The endpoints before and after, by their keys in ascending order.
    fn pairs(&self) -> impl Iterator<Item = (Option<&Endpoint>, Option<&Endpoint>)> {
        fn of(state: Option<&Arc<ServiceState>>) -> impl Iterator<Item = (&EndpointKey, &Endpoint)> {
            state.into_iter().flat_map(|it| &it.endpoints).map(|it| (&it.key, &**it))
        }
        diff::pairs(of(self.old), of(self.new)).map(|(_, old, new)| (old, new))
    }
}

/// The nodes that differ, as they are now.
fn differing_nodes(old: &NodeInfos, new: &NodeInfos) -> Vec<(Arc<str>, Option<NodeInfo>)> {
    if old.ptr_eq(new) {
        return Vec::new();
    }
    let differing = diff::pairs(old.iter(), new.iter()).filter(|(_, old, new)| old != new);
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
