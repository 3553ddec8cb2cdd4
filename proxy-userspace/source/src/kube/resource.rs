//! The watched resources: three required ones, and optional ones.

use super::options::{Options, Selectors, WatchedPods};
use crate::kube_types::Kind;

#[derive(Debug)]
pub(super) struct Resource {
    pub(super) kind: Kind,
    /// The plural name, as in a path and in messages.
    pub(super) plural: &'static str,
    pub(super) path: &'static str,
    /// What follows if a server lacks it or does not permit it; `None` if it is required.
    pub(super) consequence: Option<&'static str>,
    /// Whether only the metadata of its objects is asked for.
    pub(super) is_metadata: bool,
}

pub(super) const PODS: &str = "pods";

/// All resources, each at its [index](Resource::index).
pub(super) static RESOURCES: [Resource; 5] = [
    Resource::new(Kind::Service, "services", "/api/v1/services"),
    Resource::new(Kind::EndpointSlice, "endpointslices", "/apis/discovery.k8s.io/v1/endpointslices"),
    Resource::new(Kind::Node, "nodes", "/api/v1/nodes"),
    Resource {
        consequence: Some("packets to cluster IPs that no Service has are not dropped"),
        ..Resource::new(Kind::ServiceCidr, "servicecidrs", "/apis/networking.k8s.io/v1/servicecidrs")
    },
    Resource {
        consequence: Some("annotations of pods have no effect"),
        is_metadata: true,
        ..Resource::new(Kind::Pod, PODS, "/api/v1/pods")
    },
];

impl Resource {
    /// A required one.
    const fn new(kind: Kind, plural: &'static str, path: &'static str) -> Self {
        Self { kind, plural, path, consequence: None, is_metadata: false }
    }

    /// Its position among [`RESOURCES`]; the required ones come first.
    pub(super) fn index(&self) -> usize {
        self.kind as usize
    }

    /// What is selected of it, the same as kube-proxy's; `None` if it is not watched at all.
    pub(super) fn selectors(&self, options: &Options) -> Option<Selectors> {
        const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
        let (labels, fields) = match self.kind {
            Kind::Service => {
                let labels = match &options.service_proxy_name {
                    Some(name) => format!("{PROXY_NAME}={name}"),
                    None => format!("!{PROXY_NAME}"),
                };
                // Excludes headless Services; supported from Kubernetes 1.31 on.
                (Some(labels), Some("spec.clusterIP!=None".into()))
            }
            Kind::EndpointSlice => (Some("!service.kubernetes.io/headless".into()), None),
            Kind::Node => (None, options.node.as_ref().map(|it| format!("metadata.name={it}"))),
            Kind::ServiceCidr => (None, None),
            Kind::Pod => match &options.pods {
                WatchedPods::None => return None,
                WatchedPods::OfNode(node) => (None, Some(format!("spec.nodeName={node}"))),
                WatchedPods::All => (None, None),
            },
        };
        Some(Selectors { labels, fields })
    }
}
