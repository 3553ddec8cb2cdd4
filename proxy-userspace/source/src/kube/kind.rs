//! The three kinds of objects that are watched.
//!
//! The one rule: what can be left out at the server is left out there.

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

/// EventType of a kind has changed: the new object, or none if it is gone.
pub(super) type Changed<K> = HashMap<<K as Kind>::Name, Option<Arc<<K as Kind>::Fact>>>;

/// A kind of objects.
pub(super) trait Kind: Send + Sync + 'static {
    /// Its place among the three.
    const INDEX: usize;
    /// As in a manifest.
    const KIND: &'static str;
    /// As in a path and in messages.
    const PLURAL: &'static str;
    /// Where the server has all of them.
    const PATH: &'static str;
    /// As it is written.
    type Object: DeserializeOwned + Send;
    /// Its identity.
    type Name: Clone + Eq + Hash + fmt::Display + Send;
    /// As the brain reads it.
    type Fact: PartialEq + Send + Sync + fmt::Debug;

    fn metadata(object: &Self::Object) -> &objects::Metadata;
    fn convert(object: &Self::Object) -> Converted<Self::Fact>;
    fn name(metadata: &objects::Metadata) -> Self::Name;
    fn among(changes: &mut ClusterChanges) -> &mut Changed<Self>;

    /// Takes out of the news what is not believed, and puts into them what is by now; `server` is the API server's
    /// address.
    fn doubt(_own: &mut ApiServerHoldDown, _news: &mut Changed<Self>, _server: Option<IpAddr>) {}
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

impl Kind for Services {
    const INDEX: usize = 0;
    const KIND: &'static str = "Service";
    const PLURAL: &'static str = "services";
    const PATH: &'static str = "/api/v1/services";
    type Object = objects::Service;
    type Name = ServiceName;
    type Fact = cluster::Service;

    fn metadata(object: &Self::Object) -> &objects::Metadata {
        &object.metadata
    }

    fn convert(object: &Self::Object) -> Converted<Self::Fact> {
        kube_types::service(object)
    }

    fn name(metadata: &objects::Metadata) -> Self::Name {
        let [namespace, name] = names(metadata);
        ServiceName { namespace, name }
    }

    fn among(changes: &mut ClusterChanges) -> &mut Changed<Self> {
        &mut changes.services
    }

    fn doubt(own: &mut ApiServerHoldDown, news: &mut Changed<Self>, server: Option<IpAddr>) {
        own.services(news, server);
    }
}

impl Kind for EndpointSlices {
    const INDEX: usize = 1;
    const KIND: &'static str = "EndpointSlice";
    const PLURAL: &'static str = "endpointslices";
    const PATH: &'static str = "/apis/discovery.k8s.io/v1/endpointslices";
    type Object = objects::EndpointSlice;
    type Name = SliceName;
    type Fact = cluster::EndpointSlice;

    fn metadata(object: &Self::Object) -> &objects::Metadata {
        &object.metadata
    }

    fn convert(object: &Self::Object) -> Converted<Self::Fact> {
        kube_types::endpoint_slice(object)
    }

    fn name(metadata: &objects::Metadata) -> Self::Name {
        let [namespace, name] = names(metadata);
        SliceName { namespace, name }
    }

    fn among(changes: &mut ClusterChanges) -> &mut Changed<Self> {
        &mut changes.slices
    }

    fn doubt(own: &mut ApiServerHoldDown, news: &mut Changed<Self>, _: Option<IpAddr>) {
        own.slices(news);
    }
}

impl Kind for Nodes {
    const INDEX: usize = 2;
    const KIND: &'static str = "Node";
    const PLURAL: &'static str = "nodes";
    const PATH: &'static str = "/api/v1/nodes";
    type Object = objects::Node;
    type Name = Arc<str>;
    type Fact = cluster::Node;

    fn metadata(object: &Self::Object) -> &objects::Metadata {
        &object.metadata
    }

    fn convert(object: &Self::Object) -> Converted<Self::Fact> {
        kube_types::node(object)
    }

    fn name(metadata: &objects::Metadata) -> Self::Name {
        let [_, name] = names(metadata);
        name
    }

    fn among(changes: &mut ClusterChanges) -> &mut Changed<Self> {
        &mut changes.nodes
    }
}

fn names(metadata: &objects::Metadata) -> [Arc<str>; 2] {
    [&metadata.namespace, &metadata.name].map(|it| it.as_deref().unwrap_or("").into())
}
