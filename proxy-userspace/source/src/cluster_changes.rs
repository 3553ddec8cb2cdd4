//! Changes of the cluster state.

use std::{collections::HashMap, sync::Arc};

use model::{
    ServiceName,
    cluster::{EndpointSlice, Node, Service, SliceName},
    state::{Pod, ServiceCidr},
};

/// Changed objects of one kind by name; `None` for a deleted object.
pub(crate) type Changed<N, T> = HashMap<N, Option<Arc<T>>>;

/// Changes of the cluster state: of each object only the newest version, so that changes never pile up.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ClusterChanges {
    /// Changed Services, `None` for deleted ones.
    pub services: HashMap<ServiceName, Option<Arc<Service>>>,
    /// Changed EndpointSlices, `None` for deleted ones.
    pub slices: HashMap<SliceName, Option<Arc<EndpointSlice>>>,
    /// Changed Nodes, `None` for deleted ones.
    pub nodes: HashMap<Arc<str>, Option<Arc<Node>>>,
    /// Changed ServiceCIDRs, `None` for deleted ones.
    pub service_cidrs: HashMap<Arc<str>, Option<Arc<ServiceCidr>>>,
    /// Changed Pods with our annotation by `namespace/name`, `None` for deleted ones.
    pub pods: HashMap<Arc<str>, Option<Arc<Pod>>>,
}

impl ClusterChanges {
    /// Whether nothing has changed.
    pub fn is_empty(&self) -> bool {
        self.services.is_empty()
            && self.slices.is_empty()
            && self.nodes.is_empty()
            && self.service_cidrs.is_empty()
            && self.pods.is_empty()
    }

    /// Adds later changes.
    pub(crate) fn extend(&mut self, later: Self) {
        self.services.extend(later.services);
        self.slices.extend(later.slices);
        self.nodes.extend(later.nodes);
        self.service_cidrs.extend(later.service_cidrs);
        self.pods.extend(later.pods);
    }
}
