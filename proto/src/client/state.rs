//! States and their differences, as the client library returns them.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    globalv1::{EndpointInfo, NodeInfo, ServiceInfo},
    localv1::{Endpoint, Extension, Node, Revision, Service},
};

/// Shared values by name.
pub(super) type Values<T> = BTreeMap<Arc<str>, Arc<T>>;
/// The new values by name; `None` for deleted ones.
pub(super) type Edits<T> = BTreeMap<Arc<str>, Option<Arc<T>>>;

/// The state of one node.
///
/// Unchanged values are shared with the previous state: equal pointers mean equal values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// Identifies the state, if the brain sends it; KPNG's does not.
    pub revision: Option<Revision>,
    /// The requested extensions that the brain sends.
    pub extensions: Vec<Extension>,
    /// The nodes of the cluster, by name; empty without the extension `Nodes`.
    pub nodes: BTreeMap<Arc<str>, Arc<Node>>,
    /// The Services, by `namespace/name`.
    pub services: BTreeMap<Arc<str>, Arc<ServiceEndpoints>>,
}

/// A Service and its endpoints.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WithEndpoints<S, E> {
    /// The Service.
    pub service: S,
    /// The endpoints, by key.
    pub endpoints: BTreeMap<Arc<str>, Arc<E>>,
}

/// A Service and the endpoints that the node may use for it. The key is the pod's name, or an opaque string.
pub type ServiceEndpoints = WithEndpoints<Service, Endpoint>;

/// A Service of the cluster and all its endpoints. The key is `slice|key`.
pub type ClusterService = WithEndpoints<ServiceInfo, EndpointInfo>;

/// The difference between two states of a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeChange {
    /// The revision of the later state, if the brain sends it; KPNG's does not.
    pub revision: Option<Revision>,
    /// The requested extensions that the brain sends.
    pub extensions: Vec<Extension>,
    /// The nodes that were added or changed, by name; `None` for those that were deleted.
    pub nodes: BTreeMap<Arc<str>, Option<Arc<Node>>>,
    /// The Services that were added or changed, or whose endpoints changed, by `namespace/name`; `None` for those that
    /// were deleted.
    pub services: BTreeMap<Arc<str>, Option<Arc<ServiceEndpoints>>>,
}

/// The state of a whole cluster.
///
/// Unchanged values are shared with the previous state: equal pointers mean equal values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cluster {
    /// The requested extensions that the brain sends.
    pub extensions: Vec<Extension>,
    /// The nodes, by name.
    pub nodes: BTreeMap<Arc<str>, Arc<NodeInfo>>,
    /// The Services, by `namespace/name`.
    pub services: BTreeMap<Arc<str>, Arc<ClusterService>>,
}

/// The difference between two states.
#[derive(Debug)]
pub(super) struct Difference<N, S, E> {
    pub(super) extensions: Vec<Extension>,
    pub(super) nodes: Edits<N>,
    pub(super) services: Edits<WithEndpoints<S, E>>,
}

impl State {
    /// Applies `change`.
    pub fn apply(&mut self, change: NodeChange) {
        let NodeChange { revision, extensions, nodes, services } = change;
        (self.revision, self.extensions) = (revision, extensions);
        edit(&mut self.nodes, nodes);
        edit(&mut self.services, services);
    }
}

impl Cluster {
    pub(super) fn apply(&mut self, difference: Difference<NodeInfo, ServiceInfo, EndpointInfo>) {
        self.extensions = difference.extensions;
        edit(&mut self.nodes, difference.nodes);
        edit(&mut self.services, difference.services);
    }
}

fn edit<T>(values: &mut Values<T>, edits: Edits<T>) {
    for (name, value) in edits {
        match value {
            Some(value) => drop(values.insert(name, value)),
            None => drop(values.remove(&name)),
        }
    }
}
