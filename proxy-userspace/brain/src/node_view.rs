//! The node whose state is derived.

use model::cluster::ClusterState;

/// The properties of a node on which its state depends. For one Service, its name only if an endpoint refers to it, and its
/// zone only if a hint names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct NodeView<'a> {
    /// The node's name: endpoints on the node of this name are local; without a name, none are.
    pub(crate) name: Option<&'a str>,
    /// Its zone, if it has the label: a node without a zone matches no zone hint.
    pub(crate) zone: Option<&'a str>,
}

impl<'a> NodeView<'a> {
    /// A node of a cluster; one that the cluster does not contain has no zone.
    pub(crate) fn new(cluster: &'a ClusterState, name: &'a str) -> Self {
        Self { name: Some(name), zone: cluster.nodes.get(name).and_then(|node| node.zone.as_deref()) }
    }
}
