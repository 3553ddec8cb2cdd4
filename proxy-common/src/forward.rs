//! Packets from outside that are forwarded whole: which node serves a flow, and how a packet is wrapped for it.
//!
//! A frontend has a range of *rows*. A flow selects a row by its hash, and the row names the node that serves it, the *owner*,
//! and the node that owned it before, the *second*, which may know connections that the owner does not know. All nodes have the
//! same rows, so a flow that enters by another node reaches the same owner (Maglev, NSDI 2016; second chance: Beamer, NSDI 2018).
//!
//! A wrapped packet is the IP packet in UDP with the header of Geneve (RFC 8926), with one option: the address of the second.

pub mod icmp;
mod wrapping;

pub use self::wrapping::{
    ETH_P_IP, ETH_P_IPV6, GeneveHeader, ICMP, ICMPV6, Ipv4Header, Ipv6Header, Probe, UdpHeader, Wrap,
    WrapFamily, Wrapping4, Wrapping6,
};
use crate::{
    counters::ForwardCounters,
    net::{Be16, V4, V6},
    random,
    tables::FrontendKey6,
};

/// The priority (`skb->priority`) of a packet that this node serves itself, with [`FORWARDED_MASK`]; the other bits are the
/// number of the second, to which it goes if conntrack does not know the connection, or [`NO_SECOND`].
pub const FORWARDED: u32 = 0x4b50_0000;
/// The bits of [`FORWARDED`].
pub const FORWARDED_MASK: u32 = 0xffff_0000;
/// Marks the number of a second: it is the owner of the row, which has a second of its own.
pub const OWNER: NodeNumber = 1 << 15;
/// The highest number of a node.
pub const MAX_NODE: NodeNumber = OWNER - 1;
/// The priority of a packet that this node has wrapped.
pub const WRAPPED: u32 = FORWARDED | NO_NODE as u32;
/// There is no second. Not 0, since `nft` cannot read a priority with a half of zero.
pub const NO_SECOND: NodeNumber = THIS_NODE;

/// The priority of a packet that this node serves itself; the second may be marked as [`OWNER`].
#[inline(always)]
pub const fn priority(second: NodeNumber) -> u32 {
    FORWARDED | if second & MAX_NODE == NO_NODE { NO_SECOND } else { second } as u32
}

/// The second in a priority, and whether it is the owner of the row.
#[inline(always)]
pub const fn second_of(priority: u32) -> (NodeNumber, bool) {
    let number = priority as NodeNumber;
    (number & MAX_NODE, number & OWNER != 0)
}

/// The number of a node; the same only within one generation of one node.
pub type NodeNumber = u16;
pub const NO_NODE: NodeNumber = 0;
pub const THIS_NODE: NodeNumber = 1;

/// The value of a frontend whose packets are forwarded; the key is a [`FrontendKey6`], IPv4 as v4-mapped.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct Forward {
    /// The position of its first row.
    pub first: u32,
    /// The number of its rows minus one; the number is a power of two.
    pub mask: u32,
    /// [`BY_CLIENT`] and its neighbors.
    pub flags: u32,
    pub counters: ForwardCounters,
}

/// A client's flows all have the same row (session affinity).
pub const BY_CLIENT: u32 = 1;
/// Connections are looked for at the node that they enter by before they go to the owner of their row: some were translated there.
pub const KNOWN_FIRST: u32 = 1 << 1;
/// Only connections that exist are forwarded; new ones are translated.
pub const ESTABLISHED_ONLY: u32 = 1 << 2;

impl Forward {
    #[inline(always)]
    pub const fn is_by_client(&self) -> bool {
        self.flags & BY_CLIENT != 0
    }

    #[inline(always)]
    pub const fn has_ended(&self) -> bool {
        self.flags & ESTABLISHED_ONLY != 0
    }
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct Row(u32);

impl Row {
    pub const fn new(owner: NodeNumber, second: NodeNumber) -> Self {
        Self(owner as u32 | (second as u32) << 16)
    }

    /// The node that serves its flows.
    #[inline(always)]
    pub const fn owner(self) -> NodeNumber {
        self.0 as NodeNumber
    }

    /// The node that owned it before, or [`NO_NODE`].
    #[inline(always)]
    pub const fn second(self) -> NodeNumber {
        (self.0 >> 16) as NodeNumber
    }
}

/// Two rows, of an even position and the one after it: the kernel rounds the entries of an array up to 8 bytes.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct RowPair(u64);

impl RowPair {
    pub const fn new(first: Row, second: Row) -> Self {
        Self(first.0 as u64 | (second.0 as u64) << 32)
    }

    /// The number of the pair with the row of a position.
    #[inline(always)]
    pub const fn of(position: u32) -> u32 {
        position / 2
    }

    /// The row of a position, which is one of the pair.
    #[inline(always)]
    pub const fn row(self, position: u32) -> Row {
        Row((self.0 >> (position % 2 * 32)) as u32)
    }
}

/// Where a node receives wrapped packets; the unspecified address if nowhere in that family.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct ForwardNode {
    pub v4: V4,
    pub v6: V6,
}

/// A packet's flow, IPv4 addresses as v4-mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The client's address.
    pub source: V6,
    /// The frontend's address.
    pub destination: V6,
    pub source_port: Be16,
    pub destination_port: Be16,
    pub protocol: u8,
    /// Whether the packet may belong to a connection that exists: it is of TCP, and no SYN.
    pub continues: bool,
}

impl Flow {
    #[inline(always)]
    pub const fn frontend(&self) -> FrontendKey6 {
        let Self { destination, destination_port, protocol, .. } = *self;
        FrontendKey6 { address: destination, port: destination_port, protocol, zero: 0 }
    }

    /// A hash that is equal for every packet of the flow, on every node; with `by_client`, for every flow of the client.
    #[inline(always)]
    pub const fn hash(&self, by_client: bool) -> u32 {
        let [a, b, c, d] = self.source.raw();
        let ports = if by_client {
            0
        } else {
            (self.source_port.get() as u64) << 32
                | (self.destination_port.get() as u64) << 8
                | self.protocol as u64
        };
        let client = word(a, b) ^ word(c, d).rotate_left(32);
        let seed = random::mix(client, ports) as u64;
        random::mix(word(c, d) ^ seed << 32, ports)
    }
}

/// Two words of an address in the same order on every machine.
#[inline(always)]
const fn word(a: u32, b: u32) -> u64 {
    (u32::from_be(a) as u64) << 32 | u32::from_be(b) as u64
}

pub trait ForwardTables {
    /// What a frontend has, if its packets are forwarded.
    fn forward(&self, frontend: FrontendKey6) -> Option<Forward>;
    fn row(&self, position: u32) -> Option<Row>;
}

/// Where a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The packet is not one to forward.
    Pass,
    /// This node serves it, unless its connection is unknown and `second` a node.
    Here {
        counters: ForwardCounters,
        /// The second, maybe marked as [`OWNER`], or [`NO_NODE`].
        second: NodeNumber,
    },
    To {
        counters: ForwardCounters,
        /// The owner of its row.
        node: NodeNumber,
        /// The second, or [`NO_NODE`].
        second: NodeNumber,
    },
}

impl Way {
    /// The other node that the first packet of a connection goes to.
    #[inline(always)]
    pub const fn onward(self) -> Option<NodeNumber> {
        match self {
            Self::To { node, .. } => Some(node),
            Self::Here { second, .. } if second & OWNER != 0 => Some(second & MAX_NODE),
            Self::Here { .. } | Self::Pass => None,
        }
    }
}

#[inline(always)]
pub fn way(tables: &impl ForwardTables, flow: &Flow) -> Way {
    let Some(forward) = tables.forward(flow.frontend()) else { return Way::Pass };
    if forward.has_ended() && !flow.continues {
        return Way::Pass;
    }
    let Some(row) = row(tables, &forward, flow) else { return Way::Pass };
    let second = if flow.continues { row.second() } else { NO_NODE };
    let counters = forward.counters;
    match row.owner() {
        NO_NODE => Way::Pass,
        THIS_NODE => Way::Here { counters, second },
        // Also a packet that begins a connection: conntrack ends the entry of an earlier one from the same port, or goes on with
        // it. Either way, all packets of the connection go the same way.
        node if forward.flags & KNOWN_FIRST != 0 => Way::Here { counters, second: node | OWNER },
        node => Way::To { counters, node, second },
    }
}

/// The second of a packet that goes on to `owner`, because this node does not know its connection.
#[inline(always)]
pub fn second_after(
    tables: &impl ForwardTables,
    forward: &Forward,
    flow: &Flow,
    owner: NodeNumber,
) -> NodeNumber {
    match row(tables, forward, flow) {
        Some(row) if row.owner() == owner && row.second() != THIS_NODE => row.second(),
        _ => NO_NODE,
    }
}

#[inline(always)]
pub fn row(tables: &impl ForwardTables, forward: &Forward, flow: &Flow) -> Option<Row> {
    tables.row(forward.first + (flow.hash(forward.is_by_client()) & forward.mask))
}

/// The UDP port of wrapped packets unless set otherwise.
pub const DEFAULT_PORT: u16 = 16_081;

const _: () = assert!(size_of::<Forward>() == 20);
const _: () = assert!(size_of::<Row>() == 4);
const _: () = assert!(size_of::<ForwardNode>() == 20);

#[cfg(all(test, feature = "user"))]
mod tests;
