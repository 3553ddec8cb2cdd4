//! The difference between two states of a node.

use std::{collections::VecDeque, sync::Arc};

use model::{
    ServiceName, diff,
    state::{Endpoint, EndpointKey, NodeState, Pod, ServiceCidr, ServiceState, Services},
};
use prost::{Message as _, bytes::Bytes};
use proxy_contract::localv1::{OpItem, Set};
use wire::Extensions;

use super::{
    change_set::{Change, ChangeSet, Diff, Kind, Phase, delete, differing, set},
    encoded::Encoded,
    node_changes::NodeChange,
};

/// Holds both states, and a pointer per Service that differs.
pub(super) struct NodeDiff {
    extensions: Extensions,
    /// Whether many clients receive the same.
    is_shared: bool,
    /// In ascending order of names; empty if the client did not request them.
    service_cidrs: Vec<Change<Arc<ServiceCidr>>>,
    pods: Vec<Change<Arc<Pod>>>,
    /// Empty if the client did not request nodes.
    nodes: Arc<[NodeChange]>,
    old: Services,
    new: Services,
    /// The Services that differ, in ascending order of names: the new ones, or the old ones of those that were deleted.
    differing: Vec<Arc<ServiceState>>,
}

impl NodeDiff {
    /// The change set that leads from `old` to `new`, whose Nodes differ by `nodes`; the cost is that of the difference. What
    /// many clients receive is encoded once.
    pub(super) fn change_set(
        old: &NodeState,
        new: &NodeState,
        nodes: Arc<[NodeChange]>,
        extensions: Extensions,
        is_shared: bool,
    ) -> ChangeSet<Self> {
        let mut services: Vec<_> = new.diff(old).filter_map(|(_, old, new)| new.or(old).cloned()).collect();
        // A thousand watchers that connect at once have one each.
        services.shrink_to_fit();
        let service_cidrs = match extensions.service_cidrs {
            true => differing(&old.service_cidrs, &new.service_cidrs, str::to_owned),
            false => Vec::new(),
        };
        let pods = match extensions.pods {
            true => differing(&old.pods, &new.pods, str::to_owned),
            false => Vec::new(),
        };
        let (old, new) = (old.services.clone(), new.services.clone());
        ChangeSet::new(Self {
            extensions,
            is_shared,
            service_cidrs,
            pods,
            nodes,
            old,
            new,
            differing: services,
        })
    }
}

impl Diff for NodeDiff {
    fn len(&self, kind: Kind) -> usize {
        match kind {
            Kind::ServiceCidrs => self.service_cidrs.len(),
            Kind::Pods => self.pods.len(),
            Kind::Nodes => self.nodes.len(),
            Kind::Services | Kind::Endpoints => self.differing.len(),
        }
    }

    fn operations(&self, phase: Phase, index: usize, out: &mut VecDeque<OpItem>) {
        let service = || {
            let name = &self.differing[index].service.name;
            let (old, new) = (self.old.get(name), self.new.get(name));
            let shared = new.filter(|_| self.is_shared).and_then(|it| Encoded::shared(it, self.extensions));
            ServiceChange { name, old, new, shared }
        };
        match phase {
            Phase::Set(Kind::ServiceCidrs) => out.extend(self.service_cidrs[index].set()),
            Phase::Delete(Kind::ServiceCidrs) => out.extend(self.service_cidrs[index].delete()),
            Phase::Set(Kind::Pods) => out.extend(self.pods[index].set()),
            Phase::Delete(Kind::Pods) => out.extend(self.pods[index].delete()),
            Phase::Set(Kind::Nodes) => out.extend(self.nodes[index].set()),
            Phase::Delete(Kind::Nodes) => out.extend(self.nodes[index].delete()),
            Phase::Set(Kind::Services) => out.extend(service().set(self.extensions)),
            Phase::Delete(Kind::Services) => out.extend(service().delete()),
            Phase::Set(Kind::Endpoints) => service().set_endpoints(out),
            Phase::Delete(Kind::Endpoints) => service().delete_endpoints(out),
        }
    }
}

/// A Service before and after.
struct ServiceChange<'a> {
    name: &'a ServiceName,
    old: Option<&'a Arc<ServiceState>>,
    new: Option<&'a Arc<ServiceState>>,
    /// The encoding of `new`.
    shared: Option<&'a Encoded>,
}

impl ServiceChange<'_> {
    fn set(&self, extensions: Extensions) -> Option<OpItem> {
        let new = self.new?;
        let is_same = self.old.is_some_and(|old| {
            old.service == new.service
                && wire::named_targets(old) == wire::named_targets(new)
                && (!extensions.trigger_times || old.trigger_time == new.trigger_time)
                && (!extensions.other_serving
                    || old.other_serving == new.other_serving && old.not_serving == new.not_serving)
        });
        (!is_same).then(|| {
            let bytes = match self.shared {
                Some(it) => it.service.clone(),
                None => wire::service_with_extensions(new, extensions).encode_to_vec().into(),
            };
            set(Set::ServicesSet, wire::service_path(self.name), bytes)
        })
    }

    fn delete(&self) -> Option<OpItem> {
        self.new.is_none().then(|| delete(Set::ServicesSet, wire::service_path(self.name)))
    }

    fn set_endpoints(&self, out: &mut VecDeque<OpItem>) {
        let Some(new) = self.new else { return };
        // The names of an endpoint's ports are in its Service.
        let same_ports = self.old.is_some_and(|old| old.service.ports == new.service.ports);
        let mut encoded = self.shared.map(|it| it.endpoints.iter());
        for (old, endpoint) in self.endpoints() {
            let Some(endpoint) = endpoint else { continue };
            let shared = encoded.as_mut().and_then(Iterator::next);
            if same_ports && old == Some(endpoint) {
                continue;
            }
            let bytes = match shared {
                Some(it) => it.clone(),
                None => Bytes::from(wire::endpoint(&new.service, endpoint).encode_to_vec()),
            };
            let before =
                self.old.zip(old).map(|(state, it)| wire::endpoint(&state.service, it).encode_to_vec());
            if before.is_none_or(|it| it != bytes) {
                out.push_back(set(Set::EndpointsSet, wire::endpoint_path(self.name, endpoint), bytes));
            }
        }
    }

    fn delete_endpoints(&self, out: &mut VecDeque<OpItem>) {
        for (old, new) in self.endpoints() {
            let (Some(endpoint), None) = (old, new) else { continue };
            // A pod's endpoint that becomes anonymous, or the other way round, keeps its path.
            let other_kind = match endpoint.key.clone() {
                EndpointKey::Pod(key) => EndpointKey::Anonymous(key),
                EndpointKey::Anonymous(key) => EndpointKey::Pod(key),
            };
            let is_path_used =
                |it: &ServiceState| it.endpoints.binary_search_by(|it| it.key.cmp(&other_kind)).is_ok();
            if !self.new.is_some_and(|it| is_path_used(it)) {
                // In descending order.
                out.push_front(delete(Set::EndpointsSet, wire::endpoint_path(self.name, endpoint)));
            }
        }
    }

    /// The endpoints before and after, in ascending order of keys.
    fn endpoints(&self) -> impl Iterator<Item = (Option<&Arc<Endpoint>>, Option<&Arc<Endpoint>>)> {
        fn of(state: Option<&Arc<ServiceState>>) -> impl Iterator<Item = (&EndpointKey, &Arc<Endpoint>)> {
            state.into_iter().flat_map(|it| &it.endpoints).map(|it| (&it.key, it))
        }
        diff::pairs(of(self.old), of(self.new)).map(|(_, old, new)| (old, new))
    }
}
