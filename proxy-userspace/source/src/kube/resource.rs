//! The watched resources: three required ones, and optional ones.

use std::{collections::HashMap, fmt, hash::Hash, net::IpAddr, sync::Arc};

use model::{
    RequestedMetadata, ServiceName,
    cluster::{self, SliceName},
    state,
};
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::apiserver_holddown::ApiServerHoldDown;
use crate::{
    ClusterChanges,
    kube_types::{
        self, Converted,
        objects::{self, Metadata},
    },
};

/// Changed objects of a resource by name; `None` for a deleted object.
pub(super) type ChangesOf<R> = HashMap<<R as Resource>::Name, Option<Arc<<R as Resource>::Value>>>;

/// A resource of the API server, implemented by its objects in JSON.
pub(super) trait Resource: DeserializeOwned + Send + 'static {
    /// Its index in the list of resources.
    const INDEX: usize;
    /// Whether a server may lack it, or may not permit it.
    const IS_OPTIONAL: bool = false;
    /// Whether only the metadata of its objects is asked for.
    const IS_METADATA: bool = false;
    /// What a server means that lacks it or does not permit it, if it is optional.
    const CONSEQUENCE: &'static str = "";
    /// The kind, as in a manifest.
    const KIND: &'static str;
    /// The plural name, as in a path and in messages.
    const PLURAL: &'static str;
    /// The path of all objects.
    const PATH: &'static str;
    /// The identity of an object.
    type Name: Clone + Eq + Hash + fmt::Display + Send;
    /// The object as the brain uses it.
    type Value: PartialEq + Send + Sync + fmt::Debug;

    fn metadata(&self) -> &Metadata;
    fn convert(&self) -> Converted<Self::Value>;
    fn name(metadata: &Metadata) -> Self::Name;
    fn changes_in(changes: &mut ClusterChanges) -> &mut ChangesOf<Self>;

    /// Adds the requested labels and annotations to an object that was converted from `text`.
    fn add_metadata(_: &mut Converted<Self::Value>, _requested: &RequestedMetadata, _text: &RawValue) {}

    /// Removes changes that are held down, and adds those whose hold-down has ended; `server` is the API server's address.
    fn hold_down(_: &mut ApiServerHoldDown, _changes: &mut ChangesOf<Self>, _server: Option<IpAddr>) {}
}

impl Resource for objects::Service {
    const INDEX: usize = 0;
    const KIND: &'static str = "Service";
    const PLURAL: &'static str = "services";
    const PATH: &'static str = "/api/v1/services";
    type Name = ServiceName;
    type Value = cluster::Service;

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn convert(&self) -> Converted<Self::Value> {
        kube_types::service(self)
    }

    fn name(metadata: &Metadata) -> Self::Name {
        let [namespace, name] = names(metadata);
        ServiceName { namespace, name }
    }

    fn changes_in(changes: &mut ClusterChanges) -> &mut ChangesOf<Self> {
        &mut changes.services
    }

    fn add_metadata(it: &mut Converted<Self::Value>, requested: &RequestedMetadata, text: &RawValue) {
        kube_types::add_metadata(it, requested, text);
    }

    fn hold_down(it: &mut ApiServerHoldDown, changes: &mut ChangesOf<Self>, server: Option<IpAddr>) {
        it.services(changes, server);
    }
}

impl Resource for objects::EndpointSlice {
    const INDEX: usize = 1;
    const KIND: &'static str = "EndpointSlice";
    const PLURAL: &'static str = "endpointslices";
    const PATH: &'static str = "/apis/discovery.k8s.io/v1/endpointslices";
    type Name = SliceName;
    type Value = cluster::EndpointSlice;

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn convert(&self) -> Converted<Self::Value> {
        kube_types::endpoint_slice(self)
    }

    fn name(metadata: &Metadata) -> Self::Name {
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

impl Resource for objects::Node {
    const INDEX: usize = 2;
    const KIND: &'static str = "Node";
    const PLURAL: &'static str = "nodes";
    const PATH: &'static str = "/api/v1/nodes";
    type Name = Arc<str>;
    type Value = cluster::Node;

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn convert(&self) -> Converted<Self::Value> {
        kube_types::node(self)
    }

    fn name(metadata: &Metadata) -> Self::Name {
        let [_, name] = names(metadata);
        name
    }

    fn changes_in(changes: &mut ClusterChanges) -> &mut ChangesOf<Self> {
        &mut changes.nodes
    }
}

impl Resource for objects::ServiceCidr {
    const INDEX: usize = 3;
    const IS_OPTIONAL: bool = true;
    const CONSEQUENCE: &'static str = "packets to cluster IPs that no Service has are not dropped";
    const KIND: &'static str = "ServiceCIDR";
    const PLURAL: &'static str = "servicecidrs";
    const PATH: &'static str = "/apis/networking.k8s.io/v1/servicecidrs";
    type Name = Arc<str>;
    type Value = state::ServiceCidr;

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn convert(&self) -> Converted<Self::Value> {
        kube_types::service_cidr(self)
    }

    fn name(metadata: &Metadata) -> Self::Name {
        let [_, name] = names(metadata);
        name
    }

    fn changes_in(changes: &mut ClusterChanges) -> &mut ChangesOf<Self> {
        &mut changes.service_cidrs
    }
}

impl Resource for objects::Pod {
    const INDEX: usize = 4;
    const IS_OPTIONAL: bool = true;
    const IS_METADATA: bool = true;
    const CONSEQUENCE: &'static str = "annotations of pods have no effect";
    const KIND: &'static str = "Pod";
    const PLURAL: &'static str = "pods";
    const PATH: &'static str = "/api/v1/pods";
    type Name = Arc<str>;
    type Value = state::Pod;

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn convert(&self) -> Converted<Self::Value> {
        kube_types::pod(self)
    }

    fn name(metadata: &Metadata) -> Self::Name {
        let [namespace, name] = names(metadata);
        format!("{namespace}/{name}").into()
    }

    fn changes_in(changes: &mut ClusterChanges) -> &mut ChangesOf<Self> {
        &mut changes.pods
    }
}

fn names(metadata: &Metadata) -> [Arc<str>; 2] {
    [&metadata.namespace, &metadata.name].map(|it| it.as_deref().unwrap_or("").into())
}
