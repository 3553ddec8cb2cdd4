//! What the datapaths report of their work.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::SocketAddr,
    ops::AddAssign,
};

use model::{Rejected, ServiceName};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApplyReport {
    /// How many Services were added, changed or removed.
    pub changed_services: usize,
    pub services: usize,
    /// How many map entries were written before the flip.
    pub entries: usize,
    /// Whether another generation is active than before.
    pub flipped: bool,
    /// Whether every entry was written, rather than the difference.
    pub is_full: bool,
    pub tables: Vec<TableFill>,
    pub rejected: Vec<Rejected>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableFill {
    /// Its name, as in pin paths.
    pub name: &'static str,
    pub entries: u32,
    /// The number of entries from which on it is replaced by a larger one.
    pub capacity: u32,
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
    /// Calls that were left to the packet path.
    pub left_to_packets: u64,
    /// Connections and UDP flows to addresses that are reachable from outside, which the packet path has translated.
    pub external_connections: u64,
    pub forwarding: ForwardCounts,
}

impl AddAssign for PortCounts {
    fn add_assign(&mut self, it: Self) {
        self.connections += it.connections;
        self.no_backend += it.no_backend;
        self.denied += it.denied;
        self.left_to_packets += it.left_to_packets;
        self.external_connections += it.external_connections;
        self.forwarding += it.forwarding;
    }
}

/// Packets from outside that are forwarded whole, of a service port. Of those that belong together, the kernel may have joined
/// several: each counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ForwardCounts {
    /// Packets that were sent on to the node that serves them.
    pub sent: PacketCount,
    /// Packets that this node received from outside and served.
    pub served: PacketCount,
    /// Packets that another node sent on to this one.
    pub received: PacketCount,
    /// Packets of unknown connections that went on to the node that served their row before.
    pub second_chances: u64,
    /// Packets that were dropped: not sent by a node, or too big for a wrapping.
    pub dropped: u64,
}

impl ForwardCounts {
    /// The packets that were sent on, received, or served where they entered.
    pub fn packets(&self) -> u64 {
        self.sent.packets + self.served.packets + self.received.packets
    }
}

impl AddAssign for ForwardCounts {
    fn add_assign(&mut self, it: Self) {
        self.sent += it.sent;
        self.served += it.served;
        self.received += it.received;
        self.second_chances += it.second_chances;
        self.dropped += it.dropped;
    }
}

impl AddAssign for PacketCount {
    fn add_assign(&mut self, it: Self) {
        self.packets += it.packets;
        self.bytes += it.bytes;
    }
}

/// Packets, and their bytes with Ethernet headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketCount {
    pub packets: u64,
    pub bytes: u64,
}

/// Usage of the tables that clients fill.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    pub overflow: OverflowStats,
    /// The network namespaces that were refused most.
    pub refused: Vec<RefusedNamespace>,
    /// How many clients were ever inserted into the session affinity table.
    pub affinity_inserts: u64,
    /// How many clients the session affinity table has room for.
    pub affinity_capacity: u32,
    /// The endpoints that clients avoid, sorted.
    pub ejected: Vec<EjectedEndpoint>,
    /// How often endpoints were ever ejected.
    pub ejections: Ejections,
    pub peers: PeerCounts,
}

/// How many addresses of nodes that packets from outside are forwarded to answer probes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerCounts {
    pub answering: usize,
    /// They do not answer any more.
    pub silent: usize,
    /// They have never answered.
    pub mute: usize,
}

/// An endpoint that clients avoid because their connections to it failed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EjectedEndpoint {
    pub service: ServiceName,
    /// The name of its port; empty if it has none.
    pub port: String,
    pub endpoint: SocketAddr,
    /// How many clients avoid it; each is a network namespace.
    pub clients: usize,
    /// Whether the node's own network namespace is one of them.
    pub has_node: bool,
    /// How much of a set of its service port may be ejected; 0 if none may.
    pub max_ejected_percent: u8,
}

/// The endpoints that packets avoid, by Service.
pub type AvoidedEndpoints = BTreeMap<ServiceName, BTreeSet<AvoidedEndpoint>>;

/// An endpoint that packets avoid.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AvoidedEndpoint {
    /// The name of the service port; empty if it has none.
    pub port: String,
    pub endpoint: SocketAddr,
    /// How much of a set of the service port may be avoided, in percent.
    pub max_percent: u8,
}

impl TableStats {
    /// The endpoints that packets avoid: those to which connections of the node itself failed. What pods say of an endpoint
    /// counts for their own connections only, since they may lie.
    pub fn avoided(&self) -> AvoidedEndpoints {
        let mut avoided = AvoidedEndpoints::new();
        for it in self.ejected.iter().filter(|it| it.has_node && it.max_ejected_percent > 0) {
            let EjectedEndpoint { service, port, endpoint, max_ejected_percent: max_percent, .. } =
                it.clone();
            avoided.entry(service).or_default().insert(AvoidedEndpoint { port, endpoint, max_percent });
        }
        avoided
    }
}

impl fmt::Display for EjectedEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { service, port, endpoint, .. } = self;
        let colon = if port.is_empty() { "" } else { ":" };
        write!(f, "{endpoint} of {service}{colon}{port}")
    }
}

/// How often endpoints were ejected, by the reason of the last failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ejections {
    /// A connection was not answered within the time of the first retransmission, about a second.
    pub timeouts: u64,
    pub refusals: u64,
}

/// Usage of the maps in which the packet path keeps clients with session affinity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketAffinity {
    /// How many clients have an endpoint that they keep for the timeout of their Service.
    pub clients: usize,
    /// How many clients, or groups of them, have an endpoint for a short time, until it has answered.
    pub unanswered: usize,
    /// How many each of both maps has room for, per IP family.
    pub capacity: u32,
    /// How many service ports have so many clients that new ones have no session affinity.
    pub full_service_ports: usize,
}

/// Usage of the socket overflow table, which holds the translations that do not fit into the slots of their sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverflowStats {
    pub entries: u64,
    /// How many entries it has room for.
    pub capacity: u32,
    /// How many sockets ever had entries.
    pub sockets: u64,
    /// How many calls were refused because there was no room for their entry, or their network namespace had its share; and
    /// TCP connections whose peer name shows the endpoint for the same reason.
    pub refused: u64,
}

/// A network namespace whose sockets were refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedNamespace {
    /// Its cookie.
    pub netns: u64,
    /// The cgroup of the process that was refused last, relative to the cgroup of the programs, if it still exists.
    pub cgroup: Option<String>,
    pub refused: u64,
}

/// What one pass over the connected sockets of a transport did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TerminationReport {
    pub sockets: usize,
    /// Whether the sockets of every network namespace were examined.
    pub all_namespaces: bool,
}
