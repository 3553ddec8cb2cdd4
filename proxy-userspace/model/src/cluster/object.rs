//! An object of any kind, its identity, and changes of objects.

use std::{collections::HashMap, fmt, sync::Arc};

use super::{ClusterState, EndpointSlice, Node, Service, SliceName};
use crate::{
    ServiceName,
    state::{Pod, ServiceCidr},
};

/// Changed objects: of each the newest version, or `None` if it was deleted. Changes therefore never pile up.
pub type ClusterChanges = HashMap<ObjectName, Option<Object>>;

/// An object that the brain needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    /// `v1 Service`.
    Service(Arc<Service>),
    /// `discovery.k8s.io/v1 EndpointSlice`.
    EndpointSlice(Arc<EndpointSlice>),
    /// `v1 Node`.
    Node(Arc<Node>),
    /// `networking.k8s.io/v1 ServiceCIDR`.
    ServiceCidr(Arc<ServiceCidr>),
    /// `v1 Pod` with our annotation.
    Pod(Arc<Pod>),
}

impl Object {
    pub fn name(&self) -> ObjectName {
        match self {
            Self::Service(it) => ObjectName::Service(it.name.clone()),
            Self::EndpointSlice(it) => ObjectName::EndpointSlice(it.name.clone()),
            Self::Node(it) => ObjectName::Node(Arc::clone(&it.name)),
            Self::ServiceCidr(it) => ObjectName::ServiceCidr(Arc::clone(&it.name)),
            Self::Pod(it) => ObjectName::Pod(Arc::clone(&it.name)),
        }
    }
}

/// Kind and name of an object; as text `Service default/web`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ObjectName {
    Service(ServiceName),
    EndpointSlice(SliceName),
    Node(Arc<str>),
    ServiceCidr(Arc<str>),
    /// A Pod, by `namespace/name`.
    Pod(Arc<str>),
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service(it) => write!(f, "Service {it}"),
            Self::EndpointSlice(it) => write!(f, "EndpointSlice {it}"),
            Self::Node(it) => write!(f, "Node {it}"),
            Self::ServiceCidr(it) => write!(f, "ServiceCIDR {it}"),
            Self::Pod(it) => write!(f, "Pod {it}"),
        }
    }
}

impl ClusterState {
    pub fn set(&mut self, object: Object) {
        match object {
            Object::Service(it) => drop(self.services.insert(it)),
            Object::EndpointSlice(it) => self.set_slice(it),
            Object::Node(it) => drop(self.nodes.insert(it)),
            Object::ServiceCidr(it) => self.set_service_cidr(it),
            Object::Pod(it) => self.set_pod(it),
        }
    }

    pub fn delete(&mut self, name: &ObjectName) {
        match name {
            ObjectName::Service(it) => drop(self.services.remove(it)),
            ObjectName::EndpointSlice(it) => self.delete_slice(it),
            ObjectName::Node(it) => drop(self.nodes.remove(it)),
            ObjectName::ServiceCidr(it) => self.delete_service_cidr(it),
            ObjectName::Pod(it) => self.delete_pod(it),
        }
    }

    pub fn apply(&mut self, changes: ClusterChanges) {
        for (name, object) in changes {
            match object {
                Some(object) => self.set(object),
                None => self.delete(&name),
            }
        }
    }
}
