//! Where the packets of connections from outside are forwarded whole, instead of translated on the node that they enter by.

use std::{net::SocketAddr, sync::Arc};

use crate::Family;

/// What becomes of packets from outside at the external and load balancer IPs of a Service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExternalForwarding {
    /// The node that they enter by translates them.
    #[default]
    Nat,
    /// They are forwarded whole to a node that has endpoints, which answers the client itself: direct server return.
    Dsr,
}

/// A port of a Service at its external and load balancer IPs of one family: packets from outside are forwarded whole to a
/// node that has endpoints, which serves them with its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardedPort {
    /// The position in [`Service::ports`](super::Service::ports).
    pub index: u16,
    /// The family of its addresses and endpoints.
    pub family: Family,
    /// The nodes that new connections from this node are spread over, in ascending order of name; each once, at least one.
    pub nodes: Arc<[NodeShare]>,
    /// What serves on this node, whichever node a connection enters by, in ascending order.
    pub targets: Arc<[SocketAddr]>,
}

/// A node, and its share of the new connections.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeShare {
    pub node: Arc<str>,
    /// How many endpoints it has; never 0.
    pub endpoints: u32,
}

/// How many nodes may have endpoints, and how many rows there are then: at least a hundred per node, so that shares differ by
/// two percent at most; and for the usual numbers of nodes more, as what a change moves beside its own share grows with the square
/// of their number. Few steps, since a table of another size has nearly all owners changed.
const ROWS: [(usize, u32); 5] =
    [(8, 1 << 10), (20, 1 << 13), (50, 1 << 16), (1_300, 1 << 17), (usize::MAX, 1 << 20)];

/// The number of rows of a port with endpoints on so many nodes: a power of two.
pub fn forwarding_rows(nodes: usize) -> u32 {
    ROWS.iter().find(|(most, _)| nodes <= *most).map_or(0, |(_, rows)| *rows)
}
