//! Labels of Kubernetes that messages contain.

/// The label of a Service with the name of its proxy.
pub(super) const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// The label of a Node with the name of its zone.
pub(super) const ZONE: &str = "topology.kubernetes.io/zone";
