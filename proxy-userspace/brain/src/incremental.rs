//! The brain at work: facts change one by one, for any number of nodes.
//!
//! The one rule: the states are those of [`node_state`](crate::node_state), and a change costs what it touches.
//! A Service is derived once for all nodes that no endpoint of it names, and once for each of the others; what comes
//! out equal is shared, and a state that did not change is the very same one.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use model::{
    ServiceName,
    cluster::{ClusterState, EndpointSlice, Node, Rejected, Service, SliceName},
    services::{Edit, Services},
    state::{NodeInfos, NodeState, ServiceState},
};

use crate::{
    NodeView, Options,
    conflicts::Claims,
    service_view::{Place, ServiceView, named_nodes},
};

/// Facts, and the states of the nodes that are served.
#[derive(Debug, Default)]
pub struct Brain {
    options: Options,
    facts: Arc<ClusterState>,
    claims: Claims,
    /// Services that want something else than before, perhaps.
    renewed: BTreeSet<ServiceName>,
    /// Services to be derived again.
    touched: BTreeSet<ServiceName>,
    /// What a node sees that no endpoint names, by its zone; without a zone first.
    zones: BTreeMap<Zone, Services>,
    nodes: BTreeMap<Arc<str>, Served>,
    /// Nodes that are new, or whose zone may have changed.
    moved: BTreeSet<Arc<str>>,
    /// What every state says of all nodes.
    cluster: NodeInfos,
    /// Nodes of which something else may have to be said.
    restated: BTreeSet<Arc<str>>,
}

type Zone = Option<Arc<str>>;

/// A node that is served.
#[derive(Debug)]
struct Served {
    zone: Zone,
    state: NodeState,
}

impl Brain {
    /// A brain that knows nothing yet.
    pub fn new(options: Options) -> Self {
        Self { options, ..Self::default() }
    }

    /// The facts, with every change so far.
    pub fn cluster_state(&self) -> &Arc<ClusterState> {
        &self.facts
    }

    /// Begins to serve a node; its state is there after the next [`recompute`](Self::recompute).
    pub fn start_serving(&mut self, node: &str) {
        if !self.nodes.contains_key(node) {
            self.moved.insert(node.into());
        }
    }

    /// Forgets a node.
    pub fn stop_serving(&mut self, node: &str) {
        self.moved.remove(node);
        self.nodes.remove(node);
    }

    /// The nodes that are served, in the order of their names.
    pub fn served_nodes(&self) -> impl Iterator<Item = &Arc<str>> {
        self.nodes.keys()
    }

    /// What every state says of all nodes, as of the last [`recompute`](Self::recompute).
    pub fn node_infos(&self) -> &NodeInfos {
        &self.cluster
    }

    /// The state of a node that is served, as of the last [`recompute`](Self::recompute).
    pub fn state(&self, node: &str) -> Option<&NodeState> {
        self.nodes.get(node).map(|it| &it.state)
    }

    /// What is not served although it was read, and why: addresses that two Services want; as of the last
    /// [`recompute`](Self::recompute).
    pub fn rejected(&self) -> impl Iterator<Item = Rejected> {
        self.claims.rejected()
    }

    /// Adds a Service, or puts it in the place of the one of the same name.
    pub fn set_service(&mut self, service: impl Into<Arc<Service>>) {
        let service = service.into();
        self.renew(&service.name);
        self.facts_mut().set_service(service);
    }

    /// Takes a Service away.
    pub fn delete_service(&mut self, name: &ServiceName) {
        self.renew(name);
        self.facts_mut().delete_service(name);
    }

    /// Adds an EndpointSlice, or puts it in the place of the one of the same name.
    pub fn set_slice(&mut self, slice: impl Into<Arc<EndpointSlice>>) {
        let slice = slice.into();
        self.touch(&slice.service);
        if let Some(old) = self.facts_mut().set_slice(slice) {
            self.touch(&old.service);
        }
    }

    /// Takes an EndpointSlice away.
    pub fn delete_slice(&mut self, name: &SliceName) {
        if let Some(old) = self.facts_mut().delete_slice(name) {
            self.touch(&old.service);
        }
    }

    /// Adds a Node, or puts it in the place of the one of the same name.
    pub fn set_node(&mut self, node: impl Into<Arc<Node>>) {
        let node = node.into();
        self.touch_node(&node.name);
        self.facts_mut().set_node(node);
    }

    /// Takes a Node away.
    pub fn delete_node(&mut self, name: &str) {
        self.touch_node(name);
        self.facts_mut().delete_node(name);
    }

    /// Puts a snapshot in the place of all facts; what it shares with those before is not looked at.
    pub fn replace_cluster(&mut self, facts: Arc<ClusterState>) {
        let before = std::mem::replace(&mut self.facts, facts);
        let after = Arc::clone(&self.facts);
        differing(before.services(), after.services(), |name| self.renew(name));
        fn slices(
            facts: &ClusterState,
        ) -> impl Iterator<Item = ((&ServiceName, &SliceName), &Arc<EndpointSlice>)> {
            facts.slices().map(|it| ((&it.service, &it.name), it))
        }
        differing(slices(&before), slices(&after), |(service, _)| self.touch(service));
        differing(before.nodes(), after.nodes(), |name| self.touch_node(name));
    }

    /// Derives what the changes so far touched, and returns the nodes whose states are new or changed.
    pub fn recompute(&mut self) -> BTreeSet<Arc<str>> {
        let mut changed = BTreeSet::new();
        for name in std::mem::take(&mut self.renewed) {
            let service = self.facts.service(&name).map(Arc::as_ref);
            for other in self.claims.set(&name, service, &self.options) {
                self.touch(&other);
            }
            self.touch(&name);
        }
        for name in std::mem::take(&mut self.touched) {
            self.derive(&name, &mut changed);
        }
        self.restate(&mut changed);
        for name in std::mem::take(&mut self.moved) {
            let zone = NodeView::new(&self.facts, &name).zone.map(Arc::from);
            if self.nodes.get(&name).is_some_and(|it| it.zone == zone) {
                continue;
            }
            let mut services = self.services_at(&name, &zone);
            if let Some(before) = self.nodes.get(&name) {
                services.reuse_equal(&before.state.services);
            }
            let state = NodeState { services, nodes: self.cluster.clone() };
            let is_new = self.nodes.get(&name).is_none_or(|it| !it.state.services.ptr_eq(&state.services));
            self.nodes.insert(Arc::clone(&name), Served { zone, state });
            if is_new {
                changed.insert(name);
            }
        }
        let in_use: BTreeSet<_> = self.nodes.values().map(|it| &it.zone).collect();
        self.zones.retain(|zone, _| in_use.contains(zone) || (zone.is_none() && !in_use.is_empty()));
        changed
    }

    /// Brings what is said of the nodes up to date.
    fn restate(&mut self, changed: &mut BTreeSet<Arc<str>>) {
        let mut has_changed = false;
        for name in std::mem::take(&mut self.restated) {
            let info = self.facts.node(&name).map(|it| &it.info);
            if self.cluster.get(&name) == info {
                continue;
            }
            has_changed = true;
            match info {
                Some(info) => self.cluster.insert(name, info.clone()),
                None => self.cluster.remove(&name),
            };
        }
        if has_changed {
            for (name, served) in &mut self.nodes {
                served.state.nodes = self.cluster.clone();
                changed.insert(Arc::clone(name));
            }
        }
    }

    fn facts_mut(&mut self) -> &mut ClusterState {
        Arc::make_mut(&mut self.facts)
    }

    fn renew(&mut self, name: &ServiceName) {
        self.renewed.insert(name.clone());
    }

    fn touch(&mut self, name: &ServiceName) {
        // Without a state there is nothing to be derived again.
        if !self.zones.is_empty() {
            self.touched.insert(name.clone());
        }
    }

    fn touch_node(&mut self, name: &str) {
        let name: Arc<str> = name.into();
        if self.nodes.contains_key(&name) {
            self.moved.insert(Arc::clone(&name));
        }
        self.restated.insert(name);
    }

    /// Derives one Service again, for every node.
    fn derive(&mut self, name: &ServiceName, changed: &mut BTreeSet<Arc<str>>) {
        let subject = ServiceView::new(&self.facts, &self.claims, name, &self.options);
        // One change for all nodes that see the same.
        let mut edits: HashMap<Place<'_>, Edit> = HashMap::new();
        for (zone, services) in &mut self.zones {
            let place = subject.place_in(zone.as_deref());
            if !edits.contains_key(&place) {
                let model = edits.get(&Place::default()).and_then(Edit::state);
                let edit = edit(&subject, name, place, [model, services.get(name)]);
                edits.insert(place, edit);
            }
            if let Some(edit) = edits.get_mut(&place) {
                edit.apply(services);
            }
        }
        for (node, Served { zone, state }) in &mut self.nodes {
            let place = subject.place(node, zone.as_deref());
            let general = edits.get_mut(&Place { node: None, ..place });
            let has_changed = match (place.node, general) {
                (None, Some(general)) => general.apply(&mut state.services),
                (_, general) => {
                    let model = general.as_ref().and_then(|it| it.state());
                    let edit = &mut edit(&subject, name, place, [model, state.services.get(name)]);
                    edit.apply(&mut state.services)
                }
            };
            if has_changed {
                changed.insert(Arc::clone(node));
            }
        }
    }

    /// What a node sees, in all.
    fn services_at(&mut self, node: &str, zone: &Zone) -> Services {
        let mut services = self.services_in(zone);
        let names = |it: &EndpointSlice| it.endpoints.iter().flat_map(named_nodes).any(|it| it == node);
        self.specialise(&mut services, names, |it| it.place(node, zone.as_deref()));
        services
    }

    /// What a node in `zone` sees that no endpoint names.
    fn services_in(&mut self, zone: &Zone) -> Services {
        if let Some(known) = self.zones.get(zone) {
            return known.clone();
        }
        let services = match zone {
            None => {
                let states = self.facts.services().keys().filter_map(|name| {
                    let state = ServiceView::new(&self.facts, &self.claims, name, &self.options)
                        .state(Place::default())?;
                    Some(Arc::new(state))
                });
                states.collect()
            }
            Some(name) => {
                let mut services = self.services_in(&None);
                let names = |it: &EndpointSlice| {
                    it.endpoints.iter().flat_map(|it| &it.zone_hints).any(|it| it == name)
                };
                self.specialise(&mut services, names, |it| it.place_in(Some(name)));
                services
            }
        };
        self.zones.insert(zone.clone(), services.clone());
        services
    }

    /// Derives the Services that a slice gives a reason to.
    fn specialise<'a>(
        &'a self,
        services: &mut Services,
        reason: impl Fn(&EndpointSlice) -> bool,
        place: impl Fn(&ServiceView<'a>) -> Place<'a>,
    ) {
        let slices = self.facts.slices().filter(|it| reason(it));
        for name in slices.map(|it| &it.service).collect::<BTreeSet<_>>() {
            let subject = ServiceView::new(&self.facts, &self.claims, name, &self.options);
            let before = services.get(name);
            edit(&subject, name, place(&subject), [before, None]).apply(services);
        }
    }
}

/// The change that brings a Service to its state at a place; whatever is the same in one of the models is shared.
///
/// The models are what a node in the same zone sees that no endpoint names, by now, and what was seen at the place before.
fn edit(
    subject: &ServiceView<'_>,
    name: &ServiceName,
    place: Place<'_>,
    models: [Option<&Arc<ServiceState>>; 2],
) -> Edit {
    let [general, _] = models;
    let Some(mut state) = subject.state_near(place, general) else { return Edit::delete(name.clone()) };
    let models = || models.into_iter().flatten();
    if let Some(same) = models().find(|it| ***it == state) {
        return Edit::set(Arc::clone(same));
    }
    for model in models().rev() {
        state.reuse_equal(model);
    }
    Edit::set(Arc::new(state))
}

/// Finds the keys at which two maps differ, in pointers; both are in ascending order.
fn differing<'a, K: Ord, V: 'a>(
    before: impl IntoIterator<Item = (K, &'a Arc<V>)>,
    after: impl IntoIterator<Item = (K, &'a Arc<V>)>,
    mut found: impl FnMut(K),
) {
    let (mut before, mut after) = (before.into_iter().peekable(), after.into_iter().peekable());
    loop {
        let order = match (before.peek(), after.peek()) {
            (None, None) => return,
            (Some(_), None) => std::cmp::Ordering::Less,
            (None, Some(_)) => std::cmp::Ordering::Greater,
            (Some((_, old)), Some((_, new))) if Arc::ptr_eq(old, new) => {
                before.next();
                after.next();
                continue;
            }
            (Some((old, _)), Some((new, _))) => old.cmp(new),
        };
        if order.is_eq() {
            before.next();
        }
        let next = if order.is_lt() { before.next() } else { after.next() };
        if let Some((key, _)) = next {
            found(key);
        }
    }
}
