//! What was true in the cluster, and when: every version of each kind of object.
//!
//! An API server has an order of changes for each kind of object, and none between kinds: a client may know newer
//! Services than EndpointSlices. So a state of the cluster that a brain may have is a version of each kind.

use std::{collections::HashMap, sync::Arc};

use api_server::{ApiServer, Resource};
use arbitrary::Unstructured;
use brain::{Options, node_state};
use fuzz::random_cluster::{self, Change};
use model::{
    cluster::{ClusterState, Object, ObjectName},
    state::{NodeState, ServiceCidr},
};
use proxy_contract::{
    client::{ServiceEndpoints, State},
    localv1::Extension,
};
use source::file::parse;
use wire::Extensions;

use crate::manifest;

const SERVICES: usize = 0;
const SLICES: usize = 1;
const NODES: usize = 2;
/// ServiceCIDRs are optional: a brain that starts may not know them yet, which is what index 0 stands for.
const CIDRS: usize = 3;

/// The options of every brain: now and then the Services do not fit into their namespace.
pub(crate) fn options() -> Options {
    Options { max_namespace_entries: 25, ..Options::default() }
}

/// An index of each kind's versions.
pub(crate) type Versions = [usize; 4];

/// Every version of each kind, with the resource version since which it is true.
pub(crate) struct Truth {
    kinds: [Vec<(u64, ClusterState)>; 4],
    only_node: Option<&'static str>,
    states: HashMap<Key, Arc<NodeState>>,
    /// By extensions, too.
    views: HashMap<(Key, Vec<i32>), Arc<State>>,
}

/// The indices of Services, EndpointSlices and Nodes, and a node.
type Key = ([usize; 3], &'static str);

#[derive(Clone, Debug)]
pub(crate) enum Observed {
    /// A state with everything in it.
    Full(NodeState),
    /// What a client has received, with these extensions.
    View(Extensions, Arc<State>),
}

/// Which versions a consumer may have seen: the smallest ones that explain what it has.
#[derive(Clone, Debug)]
pub(crate) struct Seen(Vec<Versions>);

impl Truth {
    pub(crate) fn new(only_node: Option<&'static str>) -> Self {
        let kinds = std::array::from_fn(|_| vec![(0, ClusterState::default())]);
        Self { kinds, only_node, states: HashMap::new(), views: HashMap::new() }
    }

    /// Changes an object at random, or one of those that are there again; returns what has changed.
    pub(crate) fn change(&mut self, server: &ApiServer) -> String {
        if fastrand::u8(..16) == 0 {
            return self.apply(server, random_service_cidr());
        }
        let bytes: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(1024).collect();
        let change = random_cluster::change(&mut Unstructured::new(&bytes)).expect("the bytes suffice");
        self.apply(server, change)
    }

    fn apply(&mut self, server: &ApiServer, (name, object): Change) -> String {
        let (kind, resource, path) = match &name {
            ObjectName::Service(it) => (SERVICES, Resource::Services, it.to_string()),
            ObjectName::EndpointSlice(it) => (SLICES, Resource::EndpointSlices, it.to_string()),
            ObjectName::Node(it) => (NODES, Resource::Nodes, it.to_string()),
            ObjectName::ServiceCidr(it) => (CIDRS, Resource::ServiceCidrs, it.to_string()),
            ObjectName::Pod(_) => unreachable!("no random change is of this kind"),
        };
        let Some(object) = object else {
            server.delete(resource, &path);
            self.set(kind, server, |all| all.delete(&name));
            return format!("delete {name}");
        };
        let mut line = format!("set {name}");
        if let Object::ServiceCidr(it) = &object {
            line += &format!(" to {:?}", it.cidrs);
        }
        let manifest = manifest::manifest(&object);
        // As the source of a brain reads it.
        let parsed = parse(manifest.to_string().as_bytes()).expect("the manifest is valid");
        server.set(manifest);
        let seen = parsed.objects.into_iter().map(|(_, it)| it).find(|it| self.is_watched(it));
        self.set(kind, server, |all| match seen {
            Some(it) => all.set(it),
            None => all.delete(&name),
        });
        line
    }

    /// Whether the watches of a brain select an object.
    fn is_watched(&self, object: &Object) -> bool {
        match object {
            Object::Service(it) => it.proxy_name.is_none(),
            Object::EndpointSlice(it) => !it.headless,
            Object::Node(it) => self.only_node.is_none_or(|only| *it.name == *only),
            Object::ServiceCidr(_) | Object::Pod(_) => true,
        }
    }

    /// The newest version of a kind is what the change makes of the one before.
    fn set(&mut self, kind: usize, server: &ApiServer, change: impl FnOnce(&mut ClusterState)) {
        let all = &mut self.kinds[kind];
        let (_, last) = &all[all.len() - 1];
        let mut next = last.clone();
        change(&mut next);
        if next != *last {
            all.push((server.version(), next));
        }
    }

    pub(crate) fn newest(&self) -> Versions {
        self.kinds.each_ref().map(|it| it.len() - 1)
    }

    /// The oldest state that a brain may have that starts now, if lists lack as many changes as this.
    pub(crate) fn oldest_at_start(&self, list_lag: u64) -> Versions {
        let newest = self.kinds.iter().filter_map(|it| it.last()).map(|it| it.0).max().unwrap_or(0);
        let oldest = newest.saturating_sub(list_lag);
        let mut at = self.kinds.each_ref().map(|it| it.partition_point(|it| it.0 <= oldest) - 1);
        at[CIDRS] = 0;
        at
    }

    /// The state of a node at these versions, without ServiceCIDRs.
    fn state(&mut self, at: [usize; 3], node: &'static str) -> Arc<NodeState> {
        let [services, slices, nodes] = [SERVICES, SLICES, NODES].map(|it| &self.kinds[it][at[it]].1);
        let state = self.states.entry((at, node)).or_insert_with(|| {
            let mut cluster = services.clone();
            slices.slices().for_each(|it| cluster.set_slice(Arc::clone(it)));
            nodes.nodes.values().for_each(|it| drop(cluster.nodes.insert(Arc::clone(it))));
            Arc::new(node_state(&cluster, node, &options()))
        });
        Arc::clone(state)
    }

    /// What a client with these extensions receives of it.
    fn view(&mut self, at: [usize; 3], node: &'static str, extensions: Extensions) -> Arc<State> {
        let state = self.state(at, node);
        let view = self.views.entry(((at, node), extensions.numbers())).or_insert_with(|| {
            let service = |it: &Arc<model::state::ServiceState>| {
                let mut service = wire::service_with_extensions(it, extensions);
                service.trigger_time = None;
                let endpoint =
                    |of| (wire::endpoint_key(of).into(), Arc::new(wire::endpoint(&it.service, of)));
                let endpoints = it.endpoints.iter().map(|it| endpoint(it)).collect();
                (
                    wire::service_path(&it.service.name).into(),
                    Arc::new(ServiceEndpoints { service, endpoints }),
                )
            };
            let services = state.services.values().map(service).collect();
            Arc::new(State { services, ..State::default() })
        });
        Arc::clone(view)
    }

    fn nodes_match(&mut self, at: usize, node: &'static str, observed: &Observed) -> bool {
        let expected = &self.state([0, 0, at], node).nodes;
        match observed {
            Observed::Full(state) => state.nodes == *expected,
            Observed::View(extensions, state) => {
                let nodes =
                    expected.iter().map(|(name, it)| (Arc::clone(name), Arc::new(wire::node(name, it))));
                !extensions.has(Extension::Nodes) || state.nodes == nodes.collect()
            }
        }
    }

    fn service_cidrs_match(&self, at: usize, observed: &Observed) -> bool {
        let expected = &self.kinds[CIDRS][at].1.service_cidrs;
        match observed {
            Observed::Full(state) => state.service_cidrs == *expected,
            Observed::View(extensions, state) => {
                let all =
                    expected.values().map(|it| (Arc::clone(&it.name), Arc::new(wire::service_cidr(it))));
                !extensions.has(Extension::ServiceCidrs) || state.service_cidrs == all.collect()
            }
        }
    }

    fn services_match(&mut self, at: [usize; 3], node: &'static str, observed: &Observed) -> bool {
        match observed {
            Observed::Full(state) => state.services == self.state(at, node).services,
            Observed::View(extensions, state) => state.services == self.view(at, node, *extensions).services,
        }
    }

    /// Whether a node's state is what is true now.
    pub(crate) fn is_newest(&mut self, node: &'static str, observed: &Observed) -> bool {
        let [services, slices, nodes, cidrs] = self.newest();
        self.service_cidrs_match(cidrs, observed)
            && self.nodes_match(nodes, node, observed)
            && self.services_match([services, slices, nodes], node, observed)
    }

    /// Finds out which versions explain what a consumer has, none of them older than what it has seen. False if there are none.
    pub(crate) fn follow(&mut self, seen: &mut Seen, node: &'static str, observed: &Observed) -> bool {
        let newest = self.newest();
        let mut found: Vec<Versions> = Vec::new();
        let lowest = |kind: usize| seen.0.iter().map(|it| it[kind]).min().unwrap_or(0);
        let range = |kind| lowest(kind)..=newest[kind];
        let cidrs: Vec<_> = range(CIDRS).filter(|it| self.service_cidrs_match(*it, observed)).collect();
        let nodes: Vec<_> = range(NODES).filter(|it| self.nodes_match(*it, node, observed)).collect();
        // In ascending order, so that what is found first is not above what is found later.
        for c in nodes {
            for a in range(SERVICES) {
                for b in range(SLICES) {
                    let is_new = |d: usize| {
                        let at = [a, b, c, d];
                        seen.0.iter().any(|it| is_at_least(&at, it))
                            && !found.iter().any(|it| is_at_least(&at, it))
                    };
                    let candidates: Vec<_> = cidrs.iter().copied().filter(|d| is_new(*d)).collect();
                    if candidates.is_empty() || !self.services_match([a, b, c], node, observed) {
                        continue;
                    }
                    // The first one is below the others.
                    found.push([a, b, c, candidates[0]]);
                }
            }
        }
        if found.is_empty() {
            return false;
        }
        seen.0 = found;
        true
    }
}

impl Seen {
    pub(crate) fn from(oldest: Versions) -> Self {
        Self(vec![oldest])
    }

    /// The state is that of a brain that has started again, which may have states as old as these.
    pub(crate) fn go_back(&mut self, oldest: Versions) {
        for it in &mut self.0 {
            for (it, oldest) in it.iter_mut().zip(oldest) {
                *it = oldest.min(*it);
            }
        }
        self.0.sort_unstable();
        self.0.dedup();
    }
}

fn is_at_least(at: &Versions, other: &Versions) -> bool {
    at.iter().zip(other).all(|(at, other)| at >= other)
}

fn random_service_cidr() -> Change {
    let name: Arc<str> = ["c1", "c2"][fastrand::usize(..2)].into();
    if fastrand::bool() {
        return (ObjectName::ServiceCidr(name), None);
    }
    let range = ["10.96.0.0/12", "10.112.0.0/16", "fd00:1::/112"][fastrand::usize(..3)];
    let cidrs = range.parse().into_iter().collect();
    let object = Object::ServiceCidr(ServiceCidr { name, cidrs }.into());
    (object.name(), Some(object))
}
