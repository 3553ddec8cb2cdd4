//! What the datapaths report of their work.

use std::net::SocketAddr;

use model::Rejected;

/// What one apply did.
#[derive(Clone, Debug, Default)]
pub struct ApplyReport {
    /// How many Services were added, changed or removed.
    pub changed_services: usize,
    /// How many Services there are.
    pub services: usize,
    /// How many map entries were written before the flip.
    pub entries: usize,
    /// Whether another generation is active than before.
    pub flipped: bool,
    /// Whether every entry was written, rather than the difference.
    pub is_full: bool,
    /// How full the tables are.
    pub tables: Vec<TableFill>,
    /// What is not served, and why.
    pub rejected: Vec<Rejected>,
}

/// How full a table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableFill {
    /// Its name, as in pin paths.
    pub name: &'static str,
    /// Its number of entries.
    pub entries: u32,
    /// The number of entries from which on it is replaced by a larger one.
    pub capacity: u32,
}

/// An active frontend and where it leads.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ActiveFrontend {
    /// As in `10.96.0.10:80/TCP`.
    pub frontend: String,
    /// Its backends in ascending order; empty if connections are refused.
    pub backends: Vec<SocketAddr>,
    /// The service port it belongs to, if connections to it are counted.
    pub port: Option<PortId>,
}

/// Identifies a service port by a hash of its names: the same in every generation and after every restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub u64);

/// Counters of a service port since it came to the node, over all of its frontends. They survive restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortCounts {
    /// Connections, and UDP associations, that were redirected to a backend.
    pub connections: u64,
    /// Connections that were refused because there was no backend.
    pub no_backend: u64,
    /// Calls that were denied for another reason: a bind to the node port, a datagram without room for its NAT entry.
    pub denied: u64,
}

/// Usage of the tables that clients fill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    /// The UDP NAT table.
    pub udp_nat: UdpNatStats,
    /// How many connects found their socket slot taken, so that the socket got storage of its own.
    pub slot_overflows: u64,
    /// How many clients were ever inserted into the session affinity table.
    pub affinity_inserts: u64,
    /// How many clients the session affinity table has room for.
    pub affinity_capacity: u32,
}

/// Usage of the UDP NAT table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdpNatStats {
    /// Its number of entries.
    pub entries: u64,
    /// How many entries it has room for.
    pub capacity: u32,
    /// How many datagrams were refused because there was no room for their NAT entry.
    pub refused: u64,
}

/// What one pass over the connected UDP sockets did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TerminationReport {
    /// How many sockets were terminated.
    pub sockets: usize,
    /// Whether the sockets of every network namespace were examined.
    pub all_namespaces: bool,
}
