//! Changes of the cluster, object by object.

use model::cluster::{ClusterChanges, Object, ObjectName};

use crate::Brain;

impl Brain {
    /// Adds an object, or replaces the one of the same name.
    pub fn set(&mut self, object: Object) {
        match object {
            Object::Service(it) => self.set_service(it),
            Object::EndpointSlice(it) => self.set_slice(it),
            Object::Node(it) => self.set_node(it),
            Object::ServiceCidr(it) => self.cluster_mut().set_service_cidr(it),
            Object::Pod(it) => self.cluster_mut().set_pod(it),
        }
    }

    /// Deletes an object.
    pub fn delete(&mut self, name: &ObjectName) {
        match name {
            ObjectName::Service(it) => self.delete_service(it),
            ObjectName::EndpointSlice(it) => self.delete_slice(it),
            ObjectName::Node(it) => self.delete_node(it),
            ObjectName::ServiceCidr(it) => self.cluster_mut().delete_service_cidr(it),
            ObjectName::Pod(it) => self.cluster_mut().delete_pod(it),
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
