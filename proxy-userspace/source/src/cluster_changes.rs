//! What has changed in a cluster.
//!
//! The one rule: of each object only the newest counts, so that changes never pile up.

use std::{collections::HashMap, sync::Arc};

use model::{
    ServiceName,
    cluster::{EndpointSlice, Node, Service, SliceName},
};

/// Objects that are new or different, and objects that are gone (none).
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ClusterChanges {
    /// Services.
    pub services: HashMap<ServiceName, Option<Arc<Service>>>,
    /// EndpointSlices.
    pub slices: HashMap<SliceName, Option<Arc<EndpointSlice>>>,
    /// Nodes.
    pub nodes: HashMap<Arc<str>, Option<Arc<Node>>>,
}

impl ClusterChanges {
    /// Whether nothing has changed.
    pub fn is_empty(&self) -> bool {
        self.services.is_empty() && self.slices.is_empty() && self.nodes.is_empty()
    }
}
