//! Reads counters from the kernel by the names of service ports; any process can, whether or not an instance runs.

use std::{collections::HashMap, net::SocketAddr, path::Path};

use datapath::{PortCounts, PortId};
use model::{Protocol, ServiceName};
use proxy_common::counters::{CONNECTIONS, CounterIndex, DENIED, NO_BACKEND};

use crate::{
    compile::{is_translated, port_id},
    counter_alloc::CounterOwner,
    counter_maps::{self, CounterChunks},
    error::Error,
    pins::Pins,
};

/// The counters of service ports and their backends at one moment.
#[derive(Debug, Default)]
pub struct Counts {
    values: Vec<u64>,
    /// The first counter of each owner.
    counters: HashMap<CounterOwner, CounterIndex>,
}

/// Reads all counters; there are none if no instance ever ran.
///
/// # Errors
///
/// If a map has another layout or cannot be read.
pub fn counts(pin_dir: &Path) -> Result<Counts, Error> {
    let pins = Pins::new(pin_dir);
    let stripes = counter_maps::stripes(&pins)?;
    for it in counter_maps::pinned_maps(&pins, stripes) {
        it.check()?;
    }
    let chunks = CounterChunks::open(&pins, stripes)?;
    let mut counters = HashMap::new();
    for (counter, owner) in (0..).zip(chunks.owners()?).filter(|(_, owner)| *owner != 0) {
        counters.entry(CounterOwner(owner)).or_insert(counter);
    }
    Ok(Counts { values: chunks.values()?, counters })
}

impl Counts {
    /// The counters of a service port; `None` for a protocol that is not translated.
    pub fn port(&self, service: &ServiceName, port: &str, protocol: Protocol) -> Option<PortCounts> {
        is_translated(protocol).then(|| self.of(PortId(port_id(service, port, protocol))))
    }

    /// The counters of a service port; zero if it has none.
    pub fn of(&self, port: PortId) -> PortCounts {
        let Some(&first) = self.counters.get(&CounterOwner::port(port.0)) else {
            return PortCounts::default();
        };
        let value = |offset: CounterIndex| self.value(first + offset);
        PortCounts { connections: value(CONNECTIONS), no_backend: value(NO_BACKEND), denied: value(DENIED) }
    }

    /// How many connections of a service port were redirected to one of its backends.
    pub fn to(&self, port: PortId, backend: SocketAddr) -> u64 {
        self.counters.get(&CounterOwner::backend(port.0, backend)).map_or(0, |it| self.value(*it))
    }

    fn value(&self, counter: CounterIndex) -> u64 {
        self.values.get(counter as usize).copied().unwrap_or_default()
    }
}
