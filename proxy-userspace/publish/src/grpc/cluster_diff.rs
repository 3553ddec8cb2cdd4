//! The difference between two cluster states.
//!
//! Invariant: an endpoint never exists without its Service.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use model::{
    ServiceName, Timestamp,
    cluster::{ClusterState, EndpointSlice, Node, Service, SliceName},
    diff,
};
use prost::Message as _;
use proxy_contract::localv1::{OpItem, Set};
use wire::{
    Extensions,
    cluster::{EndpointKeys, endpoint_info, is_service_sent, is_slice_sent, node_info, service_info},
};

use super::change_set::{Change, ChangeSet, Diff, Encode, Phase, delete, set};

/// Which objects a client receives.
#[derive(Clone, Copy)]
pub(super) struct Filter<'a> {
    /// The value of the label `service.kubernetes.io/service-proxy-name` of this proxy's Services.
    pub(super) proxy_name: Option<&'a str>,
    pub(super) extensions: Extensions,
}

/// The changed objects, in ascending order of paths.
pub(super) struct ClusterDiff {
    nodes: Vec<Change<Arc<Node>>>,
    services: Vec<Change<SentService>>,
    /// Their paths are prefixes of those of their endpoints.
    slices: Vec<Change<Arc<EndpointSlice>>>,
}

struct SentService {
    service: Arc<Service>,
    /// `None` if the client did not request trigger times.
    trigger_time: Option<Timestamp>,
}

#[derive(Clone, Copy)]
pub(super) enum Kind {
    Nodes,
    Services,
    Endpoints,
}

impl ClusterDiff {
    /// The change set that leads from `old` to `new`; objects that both share are not compared.
    pub(super) fn change_set(old: &ClusterState, new: &ClusterState, filter: Filter<'_>) -> ChangeSet<Self> {
        let nodes = diff::differing(old.nodes(), new.nodes()).map(|(name, old, new)| Change {
            path: format!("|{name}||"),
            old: old.cloned(),
            new: new.cloned(),
        });
        let changed = ChangedNames::of(old, new, filter);
        let (services, slices) = (changed.services(), changed.slices());
        ChangeSet::new(Self { nodes: sorted(nodes), services: sorted(services), slices: sorted(slices) })
    }
}

fn sorted<T>(changes: impl IntoIterator<Item = Change<T>>) -> Vec<Change<T>> {
    let mut changes: Vec<_> = changes.into_iter().collect();
    changes.sort_by(|a, b| a.path.cmp(&b.path));
    changes
}

impl Diff for ClusterDiff {
    type Kind = Kind;
    const PHASES: &'static [Phase<Kind>] = &[
        Phase::Set(Kind::Nodes),
        Phase::Set(Kind::Services),
        Phase::Set(Kind::Endpoints),
        Phase::Delete(Kind::Endpoints),
        Phase::Delete(Kind::Services),
        Phase::Delete(Kind::Nodes),
    ];

    fn len(&self, kind: Kind) -> usize {
        match kind {
            Kind::Nodes => self.nodes.len(),
            Kind::Services => self.services.len(),
            Kind::Endpoints => self.slices.len(),
        }
    }

    fn operations(&self, phase: Phase<Kind>, index: usize, out: &mut VecDeque<OpItem>) {
        match phase {
            Phase::Set(Kind::Nodes) => out.extend(self.nodes[index].set()),
            Phase::Delete(Kind::Nodes) => out.extend(self.nodes[index].delete()),
            Phase::Set(Kind::Services) => out.extend(self.services[index].set()),
            Phase::Delete(Kind::Services) => out.extend(self.services[index].delete()),
            Phase::Set(Kind::Endpoints) => set_endpoints(&self.slices[index], out),
            Phase::Delete(Kind::Endpoints) => delete_endpoints(&self.slices[index], out),
        }
    }
}

impl Encode for Arc<Node> {
    const SET: Set = Set::GlobalNodeInfos;

    fn encode(&self, _: &str) -> Option<Vec<u8>> {
        Some(node_info(self)?.encode_to_vec())
    }
}

impl Encode for SentService {
    const SET: Set = Set::GlobalServiceInfos;

    fn encode(&self, _: &str) -> Option<Vec<u8>> {
        Some(service_info(&self.service, self.trigger_time)?.encode_to_vec())
    }
}

fn set_endpoints(slice: &Change<Arc<EndpointSlice>>, out: &mut VecDeque<OpItem>) {
    let Some(new) = &slice.new else { return };
    let old_keys = slice.old.as_ref().map(|it| EndpointKeys::of(it)).unwrap_or_default();
    let is_same_otherwise =
        slice.old.as_ref().is_some_and(|old| old.ports == new.ports && old.service == new.service);
    for (key, endpoint) in EndpointKeys::of(new).iter() {
        if is_same_otherwise && old_keys.get(key) == Some(endpoint) {
            continue;
        }
        let bytes = endpoint_info(new, endpoint).encode_to_vec();
        out.push_back(set(Set::GlobalEndpointInfos, format!("{}{key}", slice.path), bytes));
    }
}

fn delete_endpoints(slice: &Change<Arc<EndpointSlice>>, out: &mut VecDeque<OpItem>) {
    let Some(old) = &slice.old else { return };
    let new_keys = slice.new.as_ref().map(|it| EndpointKeys::of(it)).unwrap_or_default();
    for (key, _) in EndpointKeys::of(old).iter().rev() {
        if new_keys.get(key).is_none() {
            out.push_back(delete(Set::GlobalEndpointInfos, format!("{}{key}", slice.path)));
        }
    }
}

/// The Services and slices whose messages may have changed.
struct ChangedNames<'a> {
    old: &'a ClusterState,
    new: &'a ClusterState,
    filter: Filter<'a>,
    services: BTreeSet<&'a ServiceName>,
    /// The slices before and after, as far as they are sent.
    slices: BTreeMap<&'a SliceName, [Option<&'a Arc<EndpointSlice>>; 2]>,
}

impl<'a> ChangedNames<'a> {
    fn of(old: &'a ClusterState, new: &'a ClusterState, filter: Filter<'a>) -> Self {
        let mut changed = Self { old, new, filter, services: BTreeSet::new(), slices: BTreeMap::new() };
        for (name, ..) in diff::differing(old.services(), new.services()) {
            changed.services.insert(name);
            let [before, after] = [old, new].map(|it| changed.sent_service(it, name).is_some());
            if before != after {
                // All endpoints are set or deleted with their Service.
                for slice in old.slices_of(name).filter(|_| before) {
                    changed.add_slice(0, slice);
                }
                for slice in new.slices_of(name).filter(|_| after) {
                    changed.add_slice(1, slice);
                }
            }
        }
        fn slices(
            state: &ClusterState,
        ) -> impl Iterator<Item = ((&ServiceName, &SliceName), &Arc<EndpointSlice>)> {
            state.slices().map(|it| ((&it.service, &it.name), it))
        }
        for ((service, _), before, after) in diff::differing(slices(old), slices(new)) {
            changed.services.insert(service);
            for (at, state, slice) in [(0, old, before), (1, new, after)] {
                if let Some(slice) = slice.filter(|_| changed.sent_service(state, service).is_some()) {
                    changed.add_slice(at, slice);
                }
            }
        }
        changed
    }

    /// The Service, if the client receives it.
    fn sent_service(&self, state: &'a ClusterState, name: &ServiceName) -> Option<&'a Arc<Service>> {
        let Filter { proxy_name, extensions } = self.filter;
        state.service(name).filter(|it| is_service_sent(it, proxy_name, extensions.other_proxies))
    }

    fn add_slice(&mut self, at: usize, slice: &'a Arc<EndpointSlice>) {
        if is_slice_sent(slice) {
            self.slices.entry(&slice.name).or_default()[at] = Some(slice);
        }
    }

    fn services(&self) -> impl Iterator<Item = Change<SentService>> {
        let at = |state: &'a ClusterState, name: &ServiceName| {
            let service = Arc::clone(self.sent_service(state, name)?);
            let slices = state.slices_of(name).filter(|it| !it.headless);
            let trigger_time = slices.filter_map(|it| it.trigger_time).max();
            let trigger_time = trigger_time.filter(|_| self.filter.extensions.trigger_times);
            Some(SentService { service, trigger_time })
        };
        self.services.iter().map(move |name| Change {
            path: format!("{}|{}||", name.namespace, name.name),
            old: at(self.old, name),
            new: at(self.new, name),
        })
    }

    /// Each slice under the path without its Service, and under the path with it, or under two if the Service has changed.
    fn slices(&self) -> impl Iterator<Item = Change<Arc<EndpointSlice>>> {
        self.slices.iter().flat_map(|(name, [old, new])| {
            let change =
                |service: &str, old: Option<&Arc<EndpointSlice>>, new: Option<&Arc<EndpointSlice>>| {
                    let path = format!("{}|{service}|{}|", name.namespace, name.name);
                    Change { path, old: old.cloned(), new: new.cloned() }
                };
            let mut changes = vec![change("", *old, *new)];
            match (old, new) {
                (Some(old), Some(new)) if old.service == new.service => {
                    changes.push(change(&new.service.name, Some(old), Some(new)));
                }
                _ => {
                    changes.extend(old.map(|it| change(&it.service.name, Some(it), None)));
                    changes.extend(new.map(|it| change(&it.service.name, None, Some(it))));
                }
            }
            changes
        })
    }
}
