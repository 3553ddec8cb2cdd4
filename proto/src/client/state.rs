//! States and their differences, as the client library returns them.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    globalv1::{EndpointInfo, NodeInfo, ServiceInfo},
    localv1::{Endpoint, Extension, Node, Pod, Revision, Service, ServiceCidr},
};

/// Shared values by name.
pub(super) type Values<T> = BTreeMap<Arc<str>, Arc<T>>;
/// The new values by name; `None` for deleted ones.
pub(super) type Edits<T> = BTreeMap<Arc<str>, Option<Arc<T>>>;

/// A state: the nodes and the Services with their endpoints.
///
/// Unchanged values are shared with the previous state: equal pointers mean equal values.
///
/// ```
/// use std::sync::Arc;
///
/// use proxy_contract::client::{NodeChange, ServiceEndpoints, State};
///
/// let mut state = State::default();
/// let service = Some(Arc::new(ServiceEndpoints::default()));
/// state.apply(NodeChange { services: [("default/web".into(), service)].into(), ..NodeChange::default() });
/// assert!(state.services.contains_key("default/web"));
/// state.apply(NodeChange { services: [("default/web".into(), None)].into(), ..NodeChange::default() });
/// assert!(state.services.is_empty());
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot<N, S, E> {
    /// Identifies the state of a node, if the brain sends it; KPNG's does not.
    pub revision: Option<Revision>,
    /// The requested extensions that the brain sends.
    pub extensions: Vec<Extension>,
    /// The ServiceCIDRs, by name; only with the extension `ServiceCidrs`.
    pub service_cidrs: BTreeMap<Arc<str>, Arc<ServiceCidr>>,
    /// The pods whose sockets are excluded, by `namespace/name`; only with the extension `Pods`.
    pub pods: BTreeMap<Arc<str>, Arc<Pod>>,
    /// The nodes, by name.
    pub nodes: BTreeMap<Arc<str>, Arc<N>>,
    /// The Services, by `namespace/name`.
    pub services: BTreeMap<Arc<str>, Arc<WithEndpoints<S, E>>>,
}

/// The state of one node. It has the nodes of the cluster only with the extension `Nodes`.
pub type State = Snapshot<Node, Service, Endpoint>;

/// The state of a whole cluster.
pub type Cluster = Snapshot<NodeInfo, ServiceInfo, EndpointInfo>;

/// The difference between two states.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Change<N, S, E> {
    /// The revision of the later state, if the brain sends it; KPNG's does not.
    pub revision: Option<Revision>,
    /// The requested extensions that the brain sends.
    pub extensions: Vec<Extension>,
    /// The ServiceCIDRs that were added or changed, by name; `None` for those that were deleted.
    pub service_cidrs: BTreeMap<Arc<str>, Option<Arc<ServiceCidr>>>,
    /// The pods that were added or changed, by `namespace/name`; `None` for those that were deleted.
    pub pods: BTreeMap<Arc<str>, Option<Arc<Pod>>>,
    /// The nodes that were added or changed, by name; `None` for those that were deleted.
    pub nodes: BTreeMap<Arc<str>, Option<Arc<N>>>,
    /// The Services that were added or changed, or whose endpoints changed, by `namespace/name`; `None` for those that
    /// were deleted.
    pub services: BTreeMap<Arc<str>, Option<Arc<WithEndpoints<S, E>>>>,
}

/// The difference between two states of a node.
pub type NodeChange = Change<Node, Service, Endpoint>;

/// The difference between two states of a cluster.
pub type ClusterChange = Change<NodeInfo, ServiceInfo, EndpointInfo>;

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

impl<N, S, E> Snapshot<N, S, E> {
    /// Applies `change`, which leads from this state to a later one.
    pub fn apply(&mut self, change: Change<N, S, E>) {
        let Change { revision, extensions, service_cidrs, pods, nodes, services } = change;
        (self.revision, self.extensions) = (revision, extensions);
        edit(&mut self.service_cidrs, service_cidrs);
        edit(&mut self.pods, pods);
        edit(&mut self.nodes, nodes);
        edit(&mut self.services, services);
    }
}

impl<N, S, E> Change<N, S, E> {
    pub(super) fn has_edits(&self) -> bool {
        let Self { service_cidrs, pods, nodes, services, .. } = self;
        !(service_cidrs.is_empty() && pods.is_empty() && nodes.is_empty() && services.is_empty())
    }
}

fn edit<T>(values: &mut Values<T>, edits: Edits<T>) {
    edits.into_iter().for_each(|(name, value)| put(values, name, value));
}

/// Sets a value, or deletes it if there is none.
pub(super) fn put<V>(values: &mut BTreeMap<Arc<str>, V>, name: Arc<str>, value: Option<V>) {
    match value {
        Some(value) => drop(values.insert(name, value)),
        None => drop(values.remove(&name)),
    }
}
