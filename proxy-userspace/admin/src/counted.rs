//! What was counted, Service by Service: the kernel's counters, and the names of those whose they are.
//!
//! The one rule: the kernel is asked at the moment somebody asks, and never while the record is locked.

use std::sync::{Arc, Mutex};

use datapath::PortCounts;
use model::{Protocol, ServiceName, state::NodeState};
use publish::Published;

use crate::{
    lock,
    record::{PortCountLookup, Record},
};

/// The counters, and the state that says whose they are.
pub(crate) struct Counted {
    counts: PortCountLookup,
    published: Arc<Published>,
}

/// A service port by its names.
pub(crate) struct Port<'a> {
    pub(crate) service: &'a ServiceName,
    pub(crate) name: &'a str,
    pub(crate) protocol: Protocol,
}

impl Counted {
    /// Asks the kernel; `None` where nothing is counted, or it cannot be read.
    pub(crate) fn read(record: &Mutex<Record>) -> Option<Self> {
        let (counters, published) = {
            let record = lock(record);
            (record.counters.clone()?, record.served()?)
        };
        Some(Self { counts: (counters.0)()?, published })
    }

    /// What each service port has counted.
    pub(crate) fn ports(&self) -> impl Iterator<Item = (Port<'_>, PortCounts)> {
        let state: &NodeState = &self.published.state;
        state.services.values().flat_map(|it| {
            let service = &it.service;
            service.ports.iter().filter_map(|port| {
                let counts = (self.counts)(&service.name, &port.name, port.protocol)?;
                Some((Port { service: &service.name, name: &port.name, protocol: port.protocol }, counts))
            })
        })
    }

    /// What all service ports have counted together.
    pub(crate) fn total(&self) -> PortCounts {
        self.ports().fold(PortCounts::default(), |sum, (_, it)| PortCounts {
            connections: sum.connections + it.connections,
            no_backend: sum.no_backend + it.no_backend,
            denied: sum.denied + it.denied,
        })
    }
}
