//! The watched resources: three required ones, and optional ones.

use std::{net::IpAddr, sync::Arc};

use model::{
    RequestedMetadata, ServiceName,
    cluster::{ClusterChanges, Object, ObjectName, SliceName},
};
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::{
    apiserver_holddown::ApiServerHoldDown,
    options::{Options, Selectors, WatchedPods},
};
use crate::kube_types::{
    self, Converted,
    objects::{self, Metadata},
};

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
    /// The plural name, as in a path and in messages.
    const PLURAL: &'static str;
    /// The path of all objects.
    const PATH: &'static str;

    fn metadata(&self) -> &Metadata;

    /// The object as the brain uses it; `text` is the whole object, from which the requested labels and annotations are read.
    fn convert(&self, requested: &RequestedMetadata, text: &RawValue) -> Converted<Object>;

    /// What is selected of it, the same as kube-proxy's; `None` if it is not watched at all.
    fn selectors(_: &Options) -> Option<Selectors> {
        Some(Selectors::default())
    }

    /// The identity of an object.
    fn name(namespace: Arc<str>, name: Arc<str>) -> ObjectName;

    /// Removes changes that are held down, and adds those whose hold-down has ended; `server` is the API server's address.
    fn hold_down(_: &mut ApiServerHoldDown, _changes: &mut ClusterChanges, _server: Option<IpAddr>) {}
}

/// The identity of an object with this metadata.
pub(super) fn name_of<R: Resource>(metadata: &Metadata) -> ObjectName {
    let [namespace, name] =
        [&metadata.namespace, &metadata.name].map(|it| it.as_deref().unwrap_or("").into());
    R::name(namespace, name)
}

impl Resource for objects::Service {
    const INDEX: usize = 0;
    const PLURAL: &'static str = "services";
    const PATH: &'static str = "/api/v1/services";

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn convert(&self, requested: &RequestedMetadata, text: &RawValue) -> Converted<Object> {
        let mut converted = kube_types::service(self);
        kube_types::add_metadata(&mut converted, requested, text);
        converted.of_kind(Object::Service)
    }

    fn selectors(options: &Options) -> Option<Selectors> {
        const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
        Some(Selectors {
            labels: Some(match &options.service_proxy_name {
                Some(name) => format!("{PROXY_NAME}={name}"),
                None => format!("!{PROXY_NAME}"),
            }),
            // Excludes headless Services; supported from Kubernetes 1.31 on.
            fields: Some("spec.clusterIP!=None".into()),
            fields_are_optional: true,
        })
    }

    fn name(namespace: Arc<str>, name: Arc<str>) -> ObjectName {
        ObjectName::Service(ServiceName { namespace, name })
    }

    fn hold_down(it: &mut ApiServerHoldDown, changes: &mut ClusterChanges, server: Option<IpAddr>) {
        it.services(changes, server);
    }
}

impl Resource for objects::EndpointSlice {
    const INDEX: usize = 1;
    const PLURAL: &'static str = "endpointslices";
    const PATH: &'static str = "/apis/discovery.k8s.io/v1/endpointslices";

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn convert(&self, _: &RequestedMetadata, _: &RawValue) -> Converted<Object> {
        kube_types::endpoint_slice(self).of_kind(Object::EndpointSlice)
    }

    fn selectors(_: &Options) -> Option<Selectors> {
        let labels = Some("!service.kubernetes.io/headless".into());
        Some(Selectors { labels, ..Selectors::default() })
    }

    fn name(namespace: Arc<str>, name: Arc<str>) -> ObjectName {
        ObjectName::EndpointSlice(SliceName { namespace, name })
    }

    fn hold_down(it: &mut ApiServerHoldDown, changes: &mut ClusterChanges, _: Option<IpAddr>) {
        it.slices(changes);
    }
}

impl Resource for objects::Node {
    const INDEX: usize = 2;
    const PLURAL: &'static str = "nodes";
    const PATH: &'static str = "/api/v1/nodes";

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn convert(&self, _: &RequestedMetadata, _: &RawValue) -> Converted<Object> {
        kube_types::node(self).of_kind(Object::Node)
    }

    fn selectors(options: &Options) -> Option<Selectors> {
        let fields = options.node.as_ref().map(|it| format!("metadata.name={it}"));
        Some(Selectors { fields, ..Selectors::default() })
    }

    fn name(_: Arc<str>, name: Arc<str>) -> ObjectName {
        ObjectName::Node(name)
    }
}

impl Resource for objects::ServiceCidr {
    const INDEX: usize = 3;
    const IS_OPTIONAL: bool = true;
    const CONSEQUENCE: &'static str = "packets to cluster IPs that no Service has are not dropped";
    const PLURAL: &'static str = "servicecidrs";
    const PATH: &'static str = "/apis/networking.k8s.io/v1/servicecidrs";

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn convert(&self, _: &RequestedMetadata, _: &RawValue) -> Converted<Object> {
        kube_types::service_cidr(self).of_kind(Object::ServiceCidr)
    }

    fn name(_: Arc<str>, name: Arc<str>) -> ObjectName {
        ObjectName::ServiceCidr(name)
    }
}

impl Resource for objects::Pod {
    const INDEX: usize = 4;
    const IS_OPTIONAL: bool = true;
    const IS_METADATA: bool = true;
    const CONSEQUENCE: &'static str = "annotations of pods have no effect";
    const PLURAL: &'static str = "pods";
    const PATH: &'static str = "/api/v1/pods";

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn convert(&self, _: &RequestedMetadata, _: &RawValue) -> Converted<Object> {
        kube_types::pod(self).of_kind(Object::Pod)
    }

    fn selectors(options: &Options) -> Option<Selectors> {
        let fields = match &options.pods {
            WatchedPods::None => return None,
            WatchedPods::OfNode(node) => Some(format!("spec.nodeName={node}")),
            WatchedPods::All => None,
        };
        Some(Selectors { fields, ..Selectors::default() })
    }

    fn name(namespace: Arc<str>, name: Arc<str>) -> ObjectName {
        ObjectName::Pod(format!("{namespace}/{name}").into())
    }
}
