//! What is watched, and how.

use model::RequestedMetadata;

use super::{client_config::ClientConfig, timing::Timing};

#[derive(Clone, Debug, Default)]
pub struct Options {
    pub client_config: ClientConfig,
    /// The label value of the Services to serve; by default those without the label.
    pub service_proxy_name: Option<String>,
    /// Which labels and annotations of Services are kept.
    pub service_metadata: RequestedMetadata,
    /// The only Node to watch; by default all Nodes.
    pub node: Option<String>,
    /// Which Pods to watch, for our annotation; by default none.
    pub pods: WatchedPods,
    pub timing: Timing,
}

/// Which Pods are watched, for our annotation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum WatchedPods {
    #[default]
    None,
    /// Pods that are bound to a node.
    OfNode(String),
    /// All of the cluster.
    All,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Selectors {
    pub(super) labels: Option<String>,
    pub(super) fields: Option<String>,
}
