//! The kernel's counters, by the names of their service ports.
//!
//! Invariant: the kernel is read for each request, and never while the state is locked.

use std::sync::{Arc, Mutex};

use datapath::PortCounts;
use model::{Protocol, ServiceName, state::NodeState};
use publish::Published;

use crate::state::{AdminState, PortCountLookup, lock};

/// The counters, and the state that names their service ports.
pub(crate) struct ServiceCounters {
    counts: PortCountLookup,
    published: Arc<Published>,
}

/// The names of a service port.
pub(crate) struct PortLabels<'a> {
    pub(crate) service: &'a ServiceName,
    pub(crate) port: &'a str,
    pub(crate) protocol: Protocol,
}

impl ServiceCounters {
    /// Reads the kernel's counters; `None` if there are none or they cannot be read.
    pub(crate) fn read(state: &Mutex<AdminState>) -> Option<Self> {
        let (source, published) = {
            let state = lock(state);
            (Arc::clone(&state.counter_source.as_ref()?.0), state.served()?)
        };
        Some(Self { counts: source()?, published })
    }

    /// The counters of each service port.
    pub(crate) fn ports(&self) -> impl Iterator<Item = (PortLabels<'_>, PortCounts)> {
        let state: &NodeState = &self.published.state;
        state.services.values().flat_map(|it| {
            let service = &it.service;
            service.ports.iter().filter_map(|port| {
                let counts = self.counts.port(&service.name, &port.name, port.protocol)?;
                let labels = PortLabels { service: &service.name, port: &port.name, protocol: port.protocol };
                Some((labels, counts))
            })
        })
    }

    /// The sums over all service ports.
    pub(crate) fn total(&self) -> PortCounts {
        self.ports().fold(PortCounts::default(), |sum, (_, it)| PortCounts {
            connections: sum.connections + it.connections,
            no_backend: sum.no_backend + it.no_backend,
            denied: sum.denied + it.denied,
            left_to_packets: sum.left_to_packets + it.left_to_packets,
        })
    }
}
