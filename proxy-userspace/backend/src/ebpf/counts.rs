//! What was counted, read from the kernel by name: any process can, and none has to run.
//!
//! The one rule: it only reads, and asks nobody but the kernel.

use std::{collections::HashMap, net::SocketAddr, path::Path};

use model::{Protocol, ServiceName};
use proxy_common::counters::{CONNECTIONS, CounterIndex, DENIED, NO_BACKEND};

use super::{
    chunks::{self, Chunks},
    compile::{Transport, identity},
    counters::Owner,
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

/// What a service port has counted since it came to the node, over all of its addresses; a restart changes nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortCounts {
    /// Connections, and UDP associations, that were led to a backend.
    pub connections: u64,
    /// Those that were refused, because there was no backend.
    pub refusals: u64,
    /// What was refused for another reason: a bind to the node port, a datagram whose socket had no memory left.
    pub rejections: u64,
}

/// Reads what was counted; nothing, where nobody ever counted.
///
/// # Errors
///
/// A map that is of another layout is named.
pub fn counts(pin_dir: &Path) -> Result<Counts, Error> {
    let pins = Pins::new(pin_dir);
    let stripes = chunks::stripes(&pins)?;
    for it in chunks::pinned(&pins, stripes) {
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

/// A service port: the same for the same names, in every generation and after every restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub(super) u64);

impl Counts {
    /// What a service port has counted; `None` for a protocol that is not translated.
    pub fn port(&self, service: &ServiceName, port: &str, protocol: Protocol) -> Option<PortCounts> {
        Some(self.of(PortId(identity(service, port, Transport::of(protocol)?))))
    }

    /// What a service port has counted; nothing, if nobody knows it.
    pub fn of(&self, port: PortId) -> PortCounts {
        let Some(&first) = self.cells.get(&Owner::port(port.0)) else { return PortCounts::default() };
        let at = |cell: CounterIndex| self.at(first + cell);
        PortCounts { connections: at(CONNECTIONS), refusals: at(NO_BACKEND), rejections: at(DENIED) }
    }

    /// How many connections a service port has led to one of its backends.
    pub fn to(&self, port: PortId, backend: SocketAddr) -> u64 {
        self.cells.get(&Owner::backend(port.0, backend)).map_or(0, |cell| self.at(*cell))
    }

    fn at(&self, cell: CounterIndex) -> u64 {
        self.counts.get(cell as usize).copied().unwrap_or_default()
    }
}
