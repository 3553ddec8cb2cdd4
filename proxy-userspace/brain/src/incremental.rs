//! Keeps the states of any number of nodes up to date, change by change.
//!
//! Invariant: the states equal those of [`node_state`](crate::node_state), and the cost of a change is proportional to
//! what it affects.
//! What has changed is the difference of two snapshots: the cluster now, and the one that the states were derived from.
//! A Service is derived once for all nodes of a zone that no endpoint refers to, and once for each other node; equal
//! results are shared, and a state that did not change stays the same object.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    mem,
    sync::Arc,
};

use model::{
    Rejections, ServiceName,
    cluster::{ClusterState, Endpoint, EndpointSlice, SliceName},
    diff::differing,
    object_map::Edit,
    state::{NodeInfos, NodeState, ServiceState, Services},
};

use crate::{
    NodeView, Options,
    admission::Admission,
    affected::Affected,
    service_view::{ServiceView, referenced_nodes},
    slice_index::Replaced,
};

/// The state of a cluster, and the states of the served nodes.
#[derive(Debug, Default)]
pub struct Brain {
    options: Options,
    cluster: Arc<ClusterState>,
    /// The cluster as of the last [`recompute`](Self::recompute), from which everything here was derived.
    derived: Arc<ClusterState>,
    admission: Admission,
    rejections: Rejections,
    /// The Services of the nodes that no endpoint refers to, by zone.
    zones: BTreeMap<Zone, Services>,
    served: BTreeMap<Arc<str>, ServedNode>,
    /// Served nodes that are new, or whose zone may have changed.
    dirty_nodes: BTreeSet<Arc<str>>,
    /// The part of a node state that is the same for all nodes.
    node_infos: NodeInfos,
}

type Zone = Option<Arc<str>>;

/// So many nodes are looked for among the endpoints of a Service one by one.
const FEW: usize = 4;

/// A node whose state is kept.
#[derive(Debug)]
struct ServedNode {
    zone: Zone,
    state: NodeState,
}

impl Brain {
    pub fn new(options: Options) -> Self {
        Self { options, ..Self::default() }
    }

    /// The cluster with every change so far.
    pub fn cluster_state(&self) -> &Arc<ClusterState> {
        &self.cluster
    }

    /// The cluster, to be changed; the states follow with the next [`recompute`](Self::recompute).
    pub fn cluster_mut(&mut self) -> &mut ClusterState {
        Arc::make_mut(&mut self.cluster)
    }

    /// Replaces the whole cluster by a snapshot; what both share is not derived again.
    pub fn replace_cluster(&mut self, cluster: Arc<ClusterState>) {
        self.cluster = cluster;
    }

    /// Starts to serve a node; its state is available after the next [`recompute`](Self::recompute).
    pub fn start_serving(&mut self, node: &str) {
        if !self.served.contains_key(node) {
            self.dirty_nodes.insert(node.into());
        }
    }

    pub fn stop_serving(&mut self, node: &str) {
        self.dirty_nodes.remove(node);
        self.served.remove(node);
    }

    pub fn served_nodes(&self) -> impl Iterator<Item = &Arc<str>> {
        self.served.keys()
    }

    /// All nodes of the cluster, as of the last [`recompute`](Self::recompute).
    pub fn node_infos(&self) -> &NodeInfos {
        &self.node_infos
    }

    /// The state of a served node, as of the last [`recompute`](Self::recompute).
    pub fn state(&self, node: &str) -> Option<&NodeState> {
        self.served.get(node).map(|it| &it.state)
    }

    /// The frontends that are not served because another Service has them, and the Services that do not fit into their
    /// namespaces, by Service, as of the last [`recompute`](Self::recompute).
    pub fn rejections(&self) -> &Rejections {
        &self.rejections
    }

    /// The entries of the largest namespace, of those that are refused, too, as of the last
    /// [`recompute`](Self::recompute); see [`Options::max_namespace_entries`].
    pub fn most_namespace_entries(&self) -> u64 {
        self.admission.sizes.last().map_or(0, |it| it.0)
    }

    /// Whether nodes wait for their first state, or for that of another zone.
    pub fn has_pending_nodes(&self) -> bool {
        !self.dirty_nodes.is_empty()
    }

    /// Derives what the changes so far affect, and returns the nodes whose states are new or changed.
    pub fn recompute(&mut self) -> BTreeSet<Arc<str>> {
        self.recompute_some(usize::MAX)
    }

    /// Like [`recompute`](Self::recompute), but of the [pending](Self::has_pending_nodes) nodes it derives at most
    /// `max_pending`: a change does not wait until thousands of nodes have their first state.
    pub fn recompute_some(&mut self, max_pending: usize) -> BTreeSet<Arc<str>> {
        let mut changed = BTreeSet::new();
        let before = mem::replace(&mut self.derived, Arc::clone(&self.cluster));
        let services = self.cluster.services.diff(&before.services).map(|(name, ..)| name.clone()).collect();
        let with_slices = self.cluster.services_with_changed_slices(&before).cloned().collect();
        let affected = self.admission.update(&self.cluster, &self.options, &services, &with_slices);
        for name in self.admission.take_changed() {
            let rejected =
                self.admission.rejected_of(&self.cluster, &name, self.options.max_namespace_entries);
            self.rejections.set(&format!("Service {name}"), rejected);
        }
        // As long as no state is kept there is nothing to be derived again.
        if !self.zones.is_empty() {
            for name in affected.union(&with_slices) {
                let is_whole = affected.contains(name);
                let replaced = if is_whole { None } else { replaced_slices(&before, &self.cluster, name) };
                self.derive(name, replaced.as_ref(), &mut changed);
            }
        }
        self.update_nodes(&before, &mut changed);
        self.derive_pending(max_pending, &mut changed);
        let in_use: BTreeSet<_> = self.served.values().map(|it| &it.zone).collect();
        self.zones.retain(|zone, _| in_use.contains(zone) || (zone.is_none() && !in_use.is_empty()));
        changed
    }

    fn derive_pending(&mut self, max: usize, changed: &mut BTreeSet<Arc<str>>) {
        let mut moved = BTreeMap::new();
        while moved.len() < max
            && let Some(name) = self.dirty_nodes.pop_first()
        {
            let zone = NodeView::new(&self.cluster, &name).zone.map(Arc::from);
            if self.served.get(&name).is_none_or(|it| it.zone != zone) {
                moved.insert(name, zone);
            }
        }
        // One pass over the slices for all of them.
        let mut references: HashMap<_, _> = moved.keys().map(|it| (&**it, BTreeSet::new())).collect();
        if !references.is_empty() {
            let cluster = Arc::clone(&self.cluster);
            for slice in cluster.slices() {
                for node in slice.endpoints.iter().flat_map(referenced_nodes) {
                    if let Some(services) = references.get_mut(node) {
                        services.insert(slice.service.clone());
                    }
                }
            }
        }
        for (name, zone) in &moved {
            let referring = references.remove(&**name).unwrap_or_default();
            let mut services = self.services_of_node(name, zone, &referring);
            let before = self.served.get(name).map(|it| &it.state.services);
            if let Some(before) = before {
                services.reuse_equal(before);
            }
            if before.is_none_or(|it| !it.ptr_eq(&services)) {
                changed.insert(Arc::clone(name));
            }
            let state = NodeState {
                services,
                nodes: Arc::clone(&self.node_infos),
                service_cidrs: Arc::clone(&self.cluster.service_cidrs),
                pods: Arc::clone(&self.cluster.pods),
            };
            self.served.insert(Arc::clone(name), ServedNode { zone: zone.clone(), state });
        }
    }

    /// Updates what is the same in all states.
    fn update_nodes(&mut self, before: &ClusterState, changed: &mut BTreeSet<Arc<str>>) {
        let (service_cidrs, pods) = (&self.cluster.service_cidrs, &self.cluster.pods);
        let mut has_changed = before.service_cidrs != *service_cidrs || before.pods != *pods;
        for (name, _, node) in self.cluster.nodes.diff(&before.nodes) {
            if self.served.contains_key(name) {
                self.dirty_nodes.insert(Arc::clone(name));
            }
            let info = node.map(|it| &it.info);
            if self.node_infos.get(name) == info {
                continue;
            }
            has_changed = true;
            let node_infos = Arc::make_mut(&mut self.node_infos);
            match info {
                Some(info) => node_infos.insert(Arc::clone(name), info.clone()),
                None => node_infos.remove(name),
            };
        }
        if has_changed {
            for (name, served) in &mut self.served {
                served.state.nodes = Arc::clone(&self.node_infos);
                served.state.service_cidrs = Arc::clone(service_cidrs);
                served.state.pods = Arc::clone(pods);
                changed.insert(Arc::clone(name));
            }
        }
    }

    /// Derives one Service again, for all zones and served nodes. Of one that is otherwise as before, `replaced` are the
    /// former slices that others replace.
    fn derive(&mut self, name: &ServiceName, replaced: Option<&Replaced>, changed: &mut BTreeSet<Arc<str>>) {
        let mut view = ServiceView::new(&self.cluster, &self.admission, name, &self.options);
        if self.served.len() > FEW {
            view = view.for_many_nodes();
        }
        let affected = replaced.and_then(|it| Affected::find(&view.slices, it));
        let affected = affected.as_ref();
        // One edit for all zones and nodes that are the same to this Service.
        let mut edits: HashMap<NodeView<'_>, Edit<ServiceState>> = HashMap::new();
        for (zone, services) in &mut self.zones {
            let node = view.unreferenced_node(zone.as_deref());
            if !edits.contains_key(&node) {
                let similar = edits.get(&NodeView::default()).and_then(Edit::object);
                let edit = derive_edit(&view, name, node, affected, [similar, services.get(name)]);
                edits.insert(node, edit);
            }
            if let Some(edit) = edits.get_mut(&node) {
                services.apply(edit);
            }
        }
        for (served, ServedNode { zone, state }) in &mut self.served {
            let node = view.node(served, zone.as_deref());
            let zone_edit = edits.get_mut(&NodeView { name: None, ..node });
            let has_changed = match (node.name, zone_edit) {
                (None, Some(edit)) => state.services.apply(edit),
                (_, edit) => {
                    let similar = edit.as_ref().and_then(|it| it.object());
                    let before = state.services.get(name);
                    let edit = derive_edit(&view, name, node, affected, [similar, before]);
                    state.services.apply(&mut { edit })
                }
            };
            if has_changed {
                changed.insert(Arc::clone(served));
            }
        }
    }

    /// The Services of a node, some of which have an endpoint that refers to it.
    fn services_of_node(&mut self, node: &str, zone: &Zone, referring: &BTreeSet<ServiceName>) -> Services {
        let mut services = self.services_of_zone(zone);
        self.derive_overrides(&mut services, referring, |it| it.node(node, zone.as_deref()));
        services
    }

    /// The Services of the nodes in `zone` that no endpoint refers to.
    fn services_of_zone(&mut self, zone: &Zone) -> Services {
        if let Some(known) = self.zones.get(zone) {
            return known.clone();
        }
        let services = match zone {
            None => {
                let states = self.cluster.services.keys().filter_map(|name| {
                    let view = ServiceView::new(&self.cluster, &self.admission, name, &self.options);
                    view.state(NodeView::default()).map(Arc::new)
                });
                states.collect()
            }
            Some(name) => {
                let mut services = self.services_of_zone(&None);
                let refers = |it: &EndpointSlice| {
                    it.endpoints.iter().flat_map(Endpoint::zone_hints).any(|it| it == name)
                };
                let slices = self.cluster.slices().filter(|it| refers(it));
                let referring = slices.map(|it| it.service.clone()).collect();
                self.derive_overrides(&mut services, &referring, |it| it.unreferenced_node(Some(name)));
                services
            }
        };
        self.zones.insert(zone.clone(), services.clone());
        services
    }

    /// Derives the Services for which the node or its zone can make a difference: those with a slice that refers to it.
    fn derive_overrides<'a>(
        &'a self,
        services: &mut Services,
        referring: &BTreeSet<ServiceName>,
        node: impl Fn(&ServiceView<'a>) -> NodeView<'a>,
    ) {
        for name in referring {
            let view = ServiceView::new(&self.cluster, &self.admission, name, &self.options);
            let mut edit = derive_edit(&view, name, node(&view), None, [services.get(name), None]);
            services.apply(&mut edit);
        }
    }
}

/// The slices of a Service that were replaced, as they were before; `None` if any was added or removed.
fn replaced_slices(before: &ClusterState, now: &ClusterState, service: &ServiceName) -> Option<Replaced> {
    fn by_name(it: &Arc<EndpointSlice>) -> (&SliceName, &Arc<EndpointSlice>) {
        (&it.name, it)
    }
    let changes = differing(before.slices_of(service).map(by_name), now.slices_of(service).map(by_name));
    let replaced = changes.map(|(name, old, new)| new.and(old).map(|old| (name.clone(), Arc::clone(old))));
    replaced.collect()
}

/// The edit that brings a Service to its state at a node; what is equal in a similar state is shared with it.
///
/// `similar` are the state at the same zone on nodes that no endpoint refers to, already up to date, and the state at
/// this node before.
fn derive_edit(
    view: &ServiceView<'_>,
    name: &ServiceName,
    node: NodeView<'_>,
    affected: Option<&Affected<'_>>,
    similar: [Option<&Arc<ServiceState>>; 2],
) -> Edit<ServiceState> {
    let [zone_state, before] = similar;
    let changed = affected.zip(before).and_then(|(affected, before)| {
        view.changed_state(node, affected, before, zone_state.map(AsRef::as_ref))
    });
    let is_whole = changed.is_none();
    let Some(mut state) = changed.or_else(|| view.state_from(node, zone_state)) else {
        return Edit::delete(name.clone());
    };
    let similar = || similar.into_iter().flatten();
    if let Some(equal) = similar().find(|it| ***it == state) {
        return Edit::set(Arc::clone(equal));
    }
    if is_whole {
        similar().rev().for_each(|it| state.reuse_equal(it));
    }
    Edit::set(Arc::new(state))
}
