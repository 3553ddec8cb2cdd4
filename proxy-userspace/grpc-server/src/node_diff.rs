//! The difference between two states of a node.

use std::{collections::VecDeque, sync::Arc};

use model::{
    ServiceName, diff,
    state::{Endpoint, EndpointKey, NodeState, Pod, ServiceCidr, ServiceState, Services},
};
use prost::{Message as _, bytes::Bytes};
use proxy_contract::localv1::{Extension, OpItem, Set};
use wire::Extensions;

use super::{
    change_set::{Change, ChangeSet, Diff, Kind, Phase, delete, differing, set},
    encoded::{Encoded, Operations},
    node_changes::NodeChange,
};

/// Holds both states, and a pointer per Service that differs.
pub(crate) struct NodeDiff {
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
    /// The operations for each of them, if many clients receive the same; empty where all are new.
    operations: Vec<Option<Arc<Operations>>>,
}

impl NodeDiff {
    /// The change set that leads from `old` to `new`, whose Nodes differ by `nodes`; the cost is that of the difference. What
    /// many clients receive is encoded once.
    pub(crate) fn change_set(
        old: &NodeState,
        new: &NodeState,
        nodes: Arc<[NodeChange]>,
        extensions: Extensions,
        is_shared: bool,
    ) -> ChangeSet<Self> {
        let is_update = is_shared && !old.services.is_empty();
        let (mut services, mut operations) = (Vec::new(), Vec::new());
        for (name, old, new) in new.diff(old) {
            services.extend(new.or(old).cloned());
            if is_update {
                let shared = || {
                    let shared = Encoded::shared(new?, extensions);
                    let change = ServiceChange { name, old, new, shared };
                    Some(shared?.operations(old?, || change.operations(extensions)))
                };
                operations.push(shared());
            }
        }
        // A thousand watchers that connect at once have one each.
        services.shrink_to_fit();
        let (cidrs, pods) = (extensions.has(Extension::ServiceCidrs), extensions.has(Extension::Pods));
        let service_cidrs = differing(cidrs, &old.service_cidrs, &new.service_cidrs, str::to_owned);
        let pods = differing(pods, &old.pods, &new.pods, str::to_owned);
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
            operations,
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
        if let Some(Some(shared)) = self.operations.get(index) {
            match phase {
                Phase::Set(Kind::Services) => return out.extend(shared.set_service.clone()),
                Phase::Set(Kind::Endpoints) => return out.extend(shared.set_endpoints.iter().cloned()),
                Phase::Delete(Kind::Endpoints) => return out.extend(shared.delete_endpoints.iter().cloned()),
                Phase::Delete(Kind::Services) => return,
                _ => {}
            }
        }
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

struct ServiceChange<'a> {
    name: &'a ServiceName,
    old: Option<&'a Arc<ServiceState>>,
    new: Option<&'a Arc<ServiceState>>,
    /// The encoding of `new`.
    shared: Option<&'a Encoded>,
}

impl ServiceChange<'_> {
    /// Everything of a Service that is neither new nor deleted.
    fn operations(&self, extensions: Extensions) -> Operations {
        let (mut set_endpoints, mut delete_endpoints) = (VecDeque::new(), VecDeque::new());
        self.set_endpoints(&mut set_endpoints);
        self.delete_endpoints(&mut delete_endpoints);
        Operations { set_service: self.set(extensions), set_endpoints, delete_endpoints }
    }

    fn set(&self, extensions: Extensions) -> Option<OpItem> {
        let new = self.new?;
        let is_same = self.old.is_some_and(|old| {
            old.service == new.service
                && wire::named_targets(old) == wire::named_targets(new)
                && (!extensions.has(Extension::TriggerTimes) || old.trigger_time == new.trigger_time)
                && (!extensions.has(Extension::OtherServing)
                    || old.other_serving == new.other_serving && old.not_serving == new.not_serving)
                && (!extensions.has(Extension::Forwarding) || old.forwarded == new.forwarded)
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
        let [old, new] = [self.old, self.new].map(|it| it.into_iter().flat_map(|it| it.endpoints_by_key()));
        diff::pairs(old, new).map(|(_, old, new)| (old, new))
    }
}

#[cfg(test)]
mod tests {
    use arbitrary::Unstructured;
    use brain::{Brain, Options};
    use fuzz::random_cluster::{NODES, change};
    use model::cluster::ClusterState;
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn items(old: &NodeState, new: &NodeState, extensions: Extensions, is_shared: bool) -> Vec<OpItem> {
        NodeDiff::change_set(old, new, Arc::default(), extensions, is_shared).collect()
    }

    proptest! {
        /// Whichever client receives it first, and whichever state it had.
        #[test]
        fn what_many_clients_receive_is_what_each_would_alone(bytes in vec(any::<u8>(), 0..3_000)) {
            let mut u = Unstructured::new(&bytes);
            let mut brain = Brain::new(Options::default());
            NODES.iter().for_each(|it| brain.start_serving(it));
            let mut states: Vec<Vec<NodeState>> = vec![Vec::new(); NODES.len()];
            while !u.is_empty() {
                let mut cluster = ClusterState::clone(brain.cluster_state());
                let Ok(change) = change(&mut u) else { break };
                cluster.apply([change].into());
                brain.replace_cluster(Arc::new(cluster));
                brain.recompute();
                for (node, before) in NODES.iter().zip(&mut states) {
                    before.extend(brain.state(node).cloned());
                }
                for before in &states {
                    let [older @ .., newest] = &before[..] else { continue };
                    for old in older.iter().rev().take(2) {
                        let [alone, shared] =
                            [false, true].map(|it| items(old, newest, Extensions::LOCAL, it));
                        prop_assert_eq!(alone, shared);
                    }
                }
            }
        }
    }
}
