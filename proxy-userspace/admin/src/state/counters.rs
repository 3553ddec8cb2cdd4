//! The kernel's counters, by the names of their service ports.
//!
//! Invariant: the kernel is read for each request, and never while the state is locked; however many readers take their time,
//! one reading is kept.

use std::sync::{Arc, Weak};

use datapath::PortCounts;
use model::state::{ServicePort, ServiceState};
use parking_lot::Mutex;

use crate::state::{AdminState, PortCountLookup};

/// The newest reading of the counters; `None` if there are none or they cannot be read.
pub(crate) struct Reading(Mutex<Option<PortCountLookup>>);

/// The reading that all readers share, while there are any.
#[derive(Default)]
pub(crate) struct NewestReading(Mutex<Weak<Reading>>);

impl NewestReading {
    pub(crate) fn read(&self, state: &Mutex<AdminState>) -> Arc<Reading> {
        let source = state.lock().readers.counters.clone();
        let counts = source.and_then(|it| it());
        let mut newest = self.0.lock();
        match newest.upgrade() {
            Some(shared) => {
                *shared.0.lock() = counts;
                shared
            }
            None => {
                let own = Arc::new(Reading(Mutex::new(counts)));
                *newest = Arc::downgrade(&own);
                own
            }
        }
    }
}

impl Reading {
    /// The counters of each port of a Service.
    pub(crate) fn each_port(&self, state: &ServiceState, mut each: impl FnMut(&ServicePort, PortCounts)) {
        let counts = self.0.lock();
        let Some(counts) = &*counts else { return };
        for it in &state.service.ports {
            let external_connections = counts.external_connections(&state.service, it);
            let sockets = counts.port(&state.service.name, &it.name, it.protocol);
            if sockets.is_some() || external_connections > 0 {
                each(it, PortCounts { external_connections, ..sockets.unwrap_or_default() });
            }
        }
    }

    /// The sums over all ports of these Services, of sockets.
    pub(crate) fn total<'a>(
        &self,
        services: impl Iterator<Item = &'a Arc<ServiceState>>,
    ) -> Option<PortCounts> {
        let counts = self.0.lock();
        let counts = counts.as_ref()?;
        let mut sum = PortCounts::default();
        services.for_each(|it| sum += counts.total(&it.service));
        Some(sum)
    }
}
