//! What makes one state of the cluster's facts of another, operation by operation.
//!
//! The one rule: an endpoint never exists without its Service.
//! Nodes, Services and endpoints are set in ascending order of paths; then endpoints, Services and Nodes are deleted in
//! descending order.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use model::{
    ServiceName, Timestamp,
    cluster::{ClusterState, EndpointSlice, Node, Service, SliceName},
    diff::differing,
};
use prost::Message as _;
use proxy_contract::{
    globalv1::ServiceInfo,
    localv1::{OpItem, Set},
};
use wire::{
    Extensions,
    cluster::{EndpointKeys, endpoint_info, is_service_sent, is_slice_sent, node_info, service_info},
};

use super::node_diff::{delete, set};

/// Which facts are told.
#[derive(Clone, Copy)]
pub(super) struct Selection<'a> {
    /// The label's value of Services that are served here.
    pub(super) proxy_name: Option<&'a str>,
    pub(super) additions: Extensions,
}

/// The operations, made one by one: whoever is slow costs no more than the two states of the facts.
pub(super) struct ClusterDiff {
    nodes: Vec<Change<Arc<Node>>>,
    services: Vec<Change<(Arc<Service>, Option<Timestamp>)>>,
    /// By the beginning of the paths of their endpoints.
    slices: Vec<Change<Arc<EndpointSlice>>>,
    phase: usize,
    /// How many are through in this phase.
    position: usize,
    ready: VecDeque<OpItem>,
}

struct Change<T> {
    path: String,
    old: Option<T>,
    new: Option<T>,
}

#[derive(Clone, Copy)]
enum Phase {
    SetNodes,
    SetServices,
    SetEndpoints,
    DeleteEndpoints,
    DeleteServices,
    DeleteNodes,
}

const PHASES: [Phase; 6] = [
    Phase::SetNodes,
    Phase::SetServices,
    Phase::SetEndpoints,
    Phase::DeleteEndpoints,
    Phase::DeleteServices,
    Phase::DeleteNodes,
];

impl ClusterDiff {
    /// What makes `new` of `old`; what both share is not looked into.
    pub(super) fn new(old: &ClusterState, new: &ClusterState, selection: Selection<'_>) -> Self {
        let nodes = differing(old.nodes(), new.nodes()).map(|(name, old, new)| Change {
            path: format!("|{name}||"),
            old: old.cloned(),
            new: new.cloned(),
        });
        let mut nodes: Vec<_> = nodes.collect();
        nodes.sort_by(|a, b| a.path.cmp(&b.path));
        let touched = Touched::of(old, new, selection);
        let (services, slices) = (touched.services(), touched.slices());
        Self { nodes, services, slices, phase: 0, position: 0, ready: VecDeque::new() }
    }

    fn operations(&mut self, phase: Phase, at: usize) {
        let ready = &mut self.ready;
        match phase {
            Phase::SetNodes => {
                let change = &self.nodes[at];
                let bytes = |it: &Option<Arc<Node>>| Some(node_info(it.as_ref()?)?.encode_to_vec());
                if let Some(now) = bytes(&change.new).filter(|now| bytes(&change.old).as_ref() != Some(now)) {
                    ready.push_back(set(Set::GlobalNodeInfos, change.path.clone(), now));
                }
            }
            Phase::DeleteNodes => {
                let change = &self.nodes[at];
                if change.new.is_none() && change.old.as_ref().is_some_and(|it| node_info(it).is_some()) {
                    ready.push_back(delete(Set::GlobalNodeInfos, change.path.clone()));
                }
            }
            Phase::SetServices => {
                let change = &self.services[at];
                let info = |it: &Option<(Arc<Service>, Option<Timestamp>)>| -> Option<ServiceInfo> {
                    let (service, trigger_time) = it.as_ref()?;
                    service_info(service, *trigger_time)
                };
                if let Some(now) = info(&change.new).filter(|now| info(&change.old).as_ref() != Some(now)) {
                    ready.push_back(set(Set::GlobalServiceInfos, change.path.clone(), now.encode_to_vec()));
                }
            }
            Phase::DeleteServices => {
                let change = &self.services[at];
                if change.new.is_none() && change.old.is_some() {
                    ready.push_back(delete(Set::GlobalServiceInfos, change.path.clone()));
                }
            }
            Phase::SetEndpoints => self.slices[at].set_endpoints(ready),
            Phase::DeleteEndpoints => self.slices[at].delete_endpoints(ready),
        }
    }
}

impl Iterator for ClusterDiff {
    type Item = OpItem;

    fn next(&mut self) -> Option<OpItem> {
        loop {
            if let Some(item) = self.ready.pop_front() {
                return Some(item);
            }
            let phase = *PHASES.get(self.phase)?;
            let count = match phase {
                Phase::SetNodes | Phase::DeleteNodes => self.nodes.len(),
                Phase::SetServices | Phase::DeleteServices => self.services.len(),
                Phase::SetEndpoints | Phase::DeleteEndpoints => self.slices.len(),
            };
            if self.position == count {
                (self.phase, self.position) = (self.phase + 1, 0);
                continue;
            }
            let at = match phase {
                Phase::SetNodes | Phase::SetServices | Phase::SetEndpoints => self.position,
                Phase::DeleteNodes | Phase::DeleteServices | Phase::DeleteEndpoints => {
                    count - 1 - self.position
                }
            };
            self.position += 1;
            self.operations(phase, at);
        }
    }
}

impl Change<Arc<EndpointSlice>> {
    fn set_endpoints(&self, ready: &mut VecDeque<OpItem>) {
        let Some(new) = &self.new else { return };
        let old_keys = self.old.as_ref().map(|it| EndpointKeys::of(it)).unwrap_or_default();
        let is_alike =
            self.old.as_ref().is_some_and(|old| old.ports == new.ports && old.service == new.service);
        for (key, endpoint) in EndpointKeys::of(new).iter() {
            if is_alike && old_keys.get(key) == Some(endpoint) {
                continue;
            }
            let bytes = endpoint_info(new, endpoint).encode_to_vec();
            ready.push_back(set(Set::GlobalEndpointInfos, format!("{}{key}", self.path), bytes));
        }
    }

    fn delete_endpoints(&self, ready: &mut VecDeque<OpItem>) {
        let Some(old) = &self.old else { return };
        let new_keys = self.new.as_ref().map(|it| EndpointKeys::of(it)).unwrap_or_default();
        for (key, _) in EndpointKeys::of(old).iter().rev() {
            if new_keys.get(key).is_none() {
                ready.push_back(delete(Set::GlobalEndpointInfos, format!("{}{key}", self.path)));
            }
        }
    }
}

/// Services and slices that may have to be told of anew.
struct Touched<'a> {
    old: &'a ClusterState,
    new: &'a ClusterState,
    selection: Selection<'a>,
    services: BTreeSet<&'a ServiceName>,
    /// By name, as they are told of before and after.
    slices: BTreeMap<&'a SliceName, [Option<&'a Arc<EndpointSlice>>; 2]>,
}

impl<'a> Touched<'a> {
    fn of(old: &'a ClusterState, new: &'a ClusterState, selection: Selection<'a>) -> Self {
        let mut touched = Self { old, new, selection, services: BTreeSet::new(), slices: BTreeMap::new() };
        for (name, ..) in differing(old.services(), new.services()) {
            touched.services.insert(name);
            let [before, after] = [old, new].map(|it| touched.told(it, name).is_some());
            if before != after {
                // All its endpoints come or go with it.
                for slice in old.slices_of(name).filter(|_| before) {
                    touched.note(0, slice);
                }
                for slice in new.slices_of(name).filter(|_| after) {
                    touched.note(1, slice);
                }
            }
        }
        fn slices(
            facts: &ClusterState,
        ) -> impl Iterator<Item = ((&ServiceName, &SliceName), &Arc<EndpointSlice>)> {
            facts.slices().map(|it| ((&it.service, &it.name), it))
        }
        for ((service, _), before, after) in differing(slices(old), slices(new)) {
            touched.services.insert(service);
            for (at, facts, slice) in [(0, old, before), (1, new, after)] {
                if let Some(slice) = slice.filter(|_| touched.told(facts, service).is_some()) {
                    touched.note(at, slice);
                }
            }
        }
        touched
    }

    /// A Service, if it is told of.
    fn told(&self, facts: &'a ClusterState, name: &ServiceName) -> Option<&'a Arc<Service>> {
        let Selection { proxy_name, additions } = self.selection;
        facts.service(name).filter(|it| is_service_sent(it, proxy_name, additions.other_proxies))
    }

    fn note(&mut self, at: usize, slice: &'a Arc<EndpointSlice>) {
        if is_slice_sent(slice) {
            self.slices.entry(&slice.name).or_default()[at] = Some(slice);
        }
    }

    fn services(&self) -> Vec<Change<(Arc<Service>, Option<Timestamp>)>> {
        let at = |facts: &'a ClusterState, name: &ServiceName| {
            let service = self.told(facts, name)?;
            let slices = facts.slices_of(name).filter(|it| !it.headless);
            let time = slices.filter_map(|it| it.trigger_time).max();
            Some((Arc::clone(service), time.filter(|_| self.selection.additions.trigger_times)))
        };
        let changes = self.services.iter().map(|name| Change {
            path: format!("{}|{}||", name.namespace, name.name),
            old: at(self.old, name),
            new: at(self.new, name),
        });
        let mut changes: Vec<_> = changes.filter(|it| it.old.is_some() || it.new.is_some()).collect();
        changes.sort_by(|a, b| a.path.cmp(&b.path));
        changes
    }

    fn slices(&self) -> Vec<Change<Arc<EndpointSlice>>> {
        let mut changes = Vec::new();
        for (name, [old, new]) in &self.slices {
            let twin = format!("{}||{}|", name.namespace, name.name);
            changes.push(Change { path: twin, old: old.cloned(), new: new.cloned() });
            let path = |it: &EndpointSlice| format!("{}|{}|{}|", name.namespace, it.service.name, name.name);
            match (old, new) {
                (Some(old), Some(new)) if old.service == new.service => changes.push(Change {
                    path: path(new),
                    old: Some(Arc::clone(old)),
                    new: Some(Arc::clone(new)),
                }),
                _ => {
                    let gone = old.map(|it| Change { path: path(it), old: Some(Arc::clone(it)), new: None });
                    let come = new.map(|it| Change { path: path(it), old: None, new: Some(Arc::clone(it)) });
                    changes.extend(gone.into_iter().chain(come));
                }
            }
        }
        changes.sort_by(|a, b| a.path.cmp(&b.path));
        changes
    }
}
