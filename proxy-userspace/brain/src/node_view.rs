//! The node whose state is derived.

use model::cluster::ClusterState;

/// The properties of a node on which its state depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeView<'a> {
    /// Its name: an endpoint on the node of this name is local.
    pub(crate) name: &'a str,
    /// Its zone, if it has the label: a node without a zone matches no zone hint.
    pub(crate) zone: Option<&'a str>,
}

impl<'a> NodeView<'a> {
    /// A node of a cluster; one that the cluster does not contain has no zone.
    pub(crate) fn new(cluster: &'a ClusterState, name: &'a str) -> Self {
        Self { name, zone: cluster.nodes.get(name).and_then(|node| node.zone.as_deref()) }
    }
}
