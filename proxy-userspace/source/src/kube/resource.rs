//! The three watched resources.

use std::{collections::HashMap, fmt, hash::Hash, net::IpAddr, sync::Arc};

use model::{
    ServiceName,
    cluster::{self, SliceName},
};
use serde::de::DeserializeOwned;

use super::apiserver_holddown::ApiServerHoldDown;
use crate::{
    ClusterChanges,
    kube_types::{self, Converted, objects},
};

/// Changed objects of a resource by name; `None` for a deleted object.
pub(super) type ChangesOf<R> = HashMap<<R as Resource>::Name, Option<Arc<<R as Resource>::Value>>>;

/// A resource of the API server.
pub(super) trait Resource: Send + Sync + 'static {
    /// Its index in the list of resources.
    const INDEX: usize;
    /// The kind, as in a manifest.
    const KIND: &'static str;
    /// The plural name, as in a path and in messages.
    const PLURAL: &'static str;
    /// The path of all objects.
    const PATH: &'static str;
    /// The object in JSON.
    type Object: DeserializeOwned + Send;
    /// The identity of an object.
    type Name: Clone + Eq + Hash + fmt::Display + Send;
    /// The object as the brain uses it.
    type Value: PartialEq + Send + Sync + fmt::Debug;

    fn metadata(object: &Self::Object) -> &objects::Metadata;
    fn convert(object: &Self::Object) -> Converted<Self::Value>;
    fn name(metadata: &objects::Metadata) -> Self::Name;
    fn changes_in(changes: &mut ClusterChanges) -> &mut ChangesOf<Self>;

    /// Removes changes that are held down, and adds those whose hold-down has ended; `server` is the API server's address.
    fn hold_down(_: &mut ApiServerHoldDown, _changes: &mut ChangesOf<Self>, _server: Option<IpAddr>) {}
}

/// `v1 Service`.
#[derive(Debug)]
pub(super) struct Services;

/// `discovery.k8s.io/v1 EndpointSlice`.
#[derive(Debug)]
pub(super) struct EndpointSlices;

/// `v1 Node`.
#[derive(Debug)]
pub(super) struct Nodes;

impl Resource for Services {
    const INDEX: usize = 0;
    const KIND: &'static str = "Service";
    const PLURAL: &'static str = "services";
    const PATH: &'static str = "/api/v1/services";
    type Object = objects::Service;
    type Name = ServiceName;
    type Value = cluster::Service;

    fn metadata(object: &Self::Object) -> &objects::Metadata {
        &object.metadata
    }

    fn convert(object: &Self::Object) -> Converted<Self::Value> {
        kube_types::service(object)
    }

    fn name(metadata: &objects::Metadata) -> Self::Name {
        let [namespace, name] = names(metadata);
        ServiceName { namespace, name }
    }

    fn changes_in(changes: &mut ClusterChanges) -> &mut ChangesOf<Self> {
        &mut changes.services
    }

    fn hold_down(it: &mut ApiServerHoldDown, changes: &mut ChangesOf<Self>, server: Option<IpAddr>) {
        it.services(changes, server);
    }
}

impl Resource for EndpointSlices {
    const INDEX: usize = 1;
    const KIND: &'static str = "EndpointSlice";
    const PLURAL: &'static str = "endpointslices";
    const PATH: &'static str = "/apis/discovery.k8s.io/v1/endpointslices";
    type Object = objects::EndpointSlice;
    type Name = SliceName;
    type Value = cluster::EndpointSlice;

    fn metadata(object: &Self::Object) -> &objects::Metadata {
        &object.metadata
    }

    fn convert(object: &Self::Object) -> Converted<Self::Value> {
        kube_types::endpoint_slice(object)
    }

    fn name(metadata: &objects::Metadata) -> Self::Name {
        let [namespace, name] = names(metadata);
        SliceName { namespace, name }
    }

    fn changes_in(changes: &mut ClusterChanges) -> &mut ChangesOf<Self> {
        &mut changes.slices
    }

    fn hold_down(it: &mut ApiServerHoldDown, changes: &mut ChangesOf<Self>, _: Option<IpAddr>) {
        it.slices(changes);
    }
}

impl Resource for Nodes {
    const INDEX: usize = 2;
    const KIND: &'static str = "Node";
    const PLURAL: &'static str = "nodes";
    const PATH: &'static str = "/api/v1/nodes";
    type Object = objects::Node;
    type Name = Arc<str>;
    type Value = cluster::Node;

    fn metadata(object: &Self::Object) -> &objects::Metadata {
        &object.metadata
    }

    fn convert(object: &Self::Object) -> Converted<Self::Value> {
        kube_types::node(object)
    }

    fn name(metadata: &objects::Metadata) -> Self::Name {
        let [_, name] = names(metadata);
        name
    }

    fn changes_in(changes: &mut ClusterChanges) -> &mut ChangesOf<Self> {
        &mut changes.nodes
    }
}

fn names(metadata: &objects::Metadata) -> [Arc<str>; 2] {
    [&metadata.namespace, &metadata.name].map(|it| it.as_deref().unwrap_or("").into())
}
