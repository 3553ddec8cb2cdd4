//! What was counted, read from the kernel by name: any process can, and none has to run.
//!
//! The one rule: it only reads, and asks nobody but the kernel.

use std::{collections::HashMap, net::SocketAddr, path::Path};

use datapath::{PortCounts, PortId};
use model::{Protocol, ServiceName};
use proxy_common::counters::{CONNECTIONS, CounterIndex, DENIED, NO_BACKEND};

use crate::{
    compile::{Transport, identity},
    counter_alloc::Owner,
    counter_maps::{self, Chunks},
    error::Error,
    pins::Pins,
};

/// What the service ports and their backends have counted, those of one moment.
#[derive(Debug, Default)]
pub struct Counts {
    counts: Vec<u64>,
    /// The first cell of each owner.
    cells: HashMap<Owner, CounterIndex>,
}

/// Reads what was counted; nothing, where nobody ever counted.
///
/// # Errors
///
/// A map that is of another layout is named.
pub fn counts(pin_dir: &Path) -> Result<Counts, Error> {
    let pins = Pins::new(pin_dir);
    let stripes = counter_maps::stripes(&pins)?;
    for it in counter_maps::pinned(&pins, stripes) {
        it.check()?;
    }
    let chunks = Chunks::open(&pins, stripes)?;
    let owners = chunks.owners()?;
    let mut cells = HashMap::new();
    for (cell, owner) in (0..).zip(owners).filter(|(_, owner)| *owner != 0) {
        // A service port has several cells, of which the first one counts.
        cells.entry(Owner(owner)).or_insert(cell);
    }
    Ok(Counts { counts: chunks.counts()?, cells })
}

impl Counts {
    /// What a service port has counted; `None` for a protocol that is not translated.
    pub fn port(&self, service: &ServiceName, port: &str, protocol: Protocol) -> Option<PortCounts> {
        Some(self.of(PortId(identity(service, port, Transport::of(protocol)?))))
    }

    /// What a service port has counted; nothing, if nobody knows it.
    pub fn of(&self, port: PortId) -> PortCounts {
        let Some(&first) = self.cells.get(&Owner::port(port.0)) else { return PortCounts::default() };
        let at = |cell: CounterIndex| self.at(first + cell);
        PortCounts { connections: at(CONNECTIONS), no_backend: at(NO_BACKEND), denied: at(DENIED) }
    }

    /// How many connections a service port has led to one of its backends.
    pub fn to(&self, port: PortId, backend: SocketAddr) -> u64 {
        self.cells.get(&Owner::backend(port.0, backend)).map_or(0, |cell| self.at(*cell))
    }

    fn at(&self, cell: CounterIndex) -> u64 {
        self.counts.get(cell as usize).copied().unwrap_or_default()
    }
}
