//! The maps and sets of a table: what their elements consist of, and how they are laid out in registers.
//!
//! The one rule: every part of a key begins at a multiple of four bytes, as in the registers it is compared with.

use std::net::IpAddr;

use model::{Family, Protocol};

/// A map or a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Map {
    /// Where a Service answers → what is done there.
    Frontends,
    /// Where a Service answers → how an endpoint is picked for traffic from inside.
    Inside,
    /// The same for traffic from outside, where that differs.
    Outside,
    /// Where a Service answers, and a slot → an endpoint.
    Endpoints,
    /// [`Map::Frontends`] of node ports, whatever the address.
    NodeFrontends,
    /// [`Map::Inside`] of node ports.
    NodeInside,
    /// [`Map::Outside`] of node ports.
    NodeOutside,
    /// [`Map::Endpoints`] of node ports.
    NodeEndpoints,
    /// A behaviour → its chain.
    Behaviours,
    /// How an endpoint is picked → the chain that does it.
    Picks,
    /// The same for node ports.
    NodePicks,
    /// Where a Service answers whose clients keep their endpoints → what names the service port: the cluster IP's frontend.
    ServicePorts,
    /// [`Map::ServicePorts`] of node ports.
    NodeServicePorts,
    /// A client and a service port → the endpoint it keeps; written by the kernel, packet by packet.
    Affinity,
    /// A service port and each endpoint that may be kept there, of the set 0.
    Members,
    /// The same for the set of traffic from outside.
    MembersExternal,
    /// The same for the set of a cluster IP.
    MembersInternal,
    /// The sources that may use a load balancer IP.
    Sources,
    /// Where node ports are served.
    NodeAddresses,
    /// The cluster IPs, at which no port is left to anybody else.
    ClusterIps,
    /// The endpoints on this node, each twice: a packet from one to itself needs another source.
    Hairpin,
}

/// A part of a key or a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    /// An IP address, in network byte order.
    Address,
    /// An IP protocol number.
    Protocol,
    /// A port, in network byte order.
    Port,
    /// A number, in the byte order of the host, as the kernel counts.
    Number,
    /// The same, as it is kept in a packet's priority.
    Priority,
}

impl Field {
    /// Its length without padding, in bytes.
    pub(super) fn length(self, family: Family) -> usize {
        match (self, family) {
            (Self::Address, Family::V4) | (Self::Number | Self::Priority, _) => 4,
            (Self::Address, Family::V6) => 16,
            (Self::Protocol, _) => 1,
            (Self::Port, _) => 2,
        }
    }

    /// The number of its type in nft (`enum datatypes`), which listings go by.
    pub(super) fn kind(self, family: Family) -> u32 {
        match (self, family) {
            (Self::Address, Family::V4) => 7,
            (Self::Address, Family::V6) => 8,
            (Self::Protocol, _) => 12,
            (Self::Port, _) => 13,
            (Self::Number, _) => 19,
            (Self::Priority, _) => 23,
        }
    }
}

/// What an element of a map leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leads {
    /// Nothing: it is a set.
    Nowhere,
    /// To data.
    To(&'static [Field]),
    /// To a verdict.
    ToChain,
}

impl Map {
    /// All of them.
    pub(super) const ALL: [Self; 21] = [
        Self::Frontends,
        Self::Inside,
        Self::Outside,
        Self::Endpoints,
        Self::NodeFrontends,
        Self::NodeInside,
        Self::NodeOutside,
        Self::NodeEndpoints,
        Self::Behaviours,
        Self::Picks,
        Self::NodePicks,
        Self::ServicePorts,
        Self::NodeServicePorts,
        Self::Affinity,
        Self::Members,
        Self::MembersExternal,
        Self::MembersInternal,
        Self::Sources,
        Self::NodeAddresses,
        Self::ClusterIps,
        Self::Hairpin,
    ];

    /// The endpoints of the set of a number that may be kept.
    pub(super) fn members(set: u32) -> Self {
        match set {
            0 => Self::Members,
            1 => Self::MembersExternal,
            _ => Self::MembersInternal,
        }
    }

    /// Its name in the table.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Frontends => "frontends",
            Self::Inside => "inside",
            Self::Outside => "outside",
            Self::Endpoints => "endpoints",
            Self::NodeFrontends => "node-frontends",
            Self::NodeInside => "node-inside",
            Self::NodeOutside => "node-outside",
            Self::NodeEndpoints => "node-endpoints",
            Self::Behaviours => "behaviours",
            Self::Picks => "picks",
            Self::NodePicks => "node-picks",
            Self::ServicePorts => "service-ports",
            Self::NodeServicePorts => "node-service-ports",
            Self::Affinity => "affinity",
            Self::Members => "members",
            Self::MembersExternal => "members-external",
            Self::MembersInternal => "members-internal",
            Self::Sources => "sources",
            Self::NodeAddresses => "node-addresses",
            Self::ClusterIps => "cluster-ips",
            Self::Hairpin => "hairpin",
        }
    }

    /// What a key consists of.
    pub(super) fn key(self) -> &'static [Field] {
        use Field::{Address, Number, Port, Priority, Protocol};

        match self {
            Self::Frontends | Self::Inside | Self::Outside | Self::ServicePorts => &[Address, Protocol, Port],
            Self::NodeFrontends | Self::NodeInside | Self::NodeOutside | Self::NodeServicePorts => {
                &[Protocol, Port]
            }
            Self::Endpoints => &[Address, Protocol, Port, Number],
            Self::NodeEndpoints => &[Protocol, Port, Number],
            Self::Behaviours | Self::Picks | Self::NodePicks => &[Priority],
            Self::Affinity => &[Address, Address, Protocol, Port],
            Self::Members | Self::MembersExternal | Self::MembersInternal => {
                &[Address, Protocol, Port, Address, Port]
            }
            Self::Sources => &[Address, Protocol, Port, Address],
            Self::NodeAddresses | Self::ClusterIps => &[Address],
            Self::Hairpin => &[Address, Address],
        }
    }

    /// What a key leads to.
    pub(super) fn leads(self) -> Leads {
        use Field::{Address, Port, Priority, Protocol};

        match self {
            Self::Frontends
            | Self::Inside
            | Self::Outside
            | Self::NodeFrontends
            | Self::NodeInside
            | Self::NodeOutside => Leads::To(&[Priority]),
            Self::Behaviours | Self::Picks | Self::NodePicks => Leads::ToChain,
            Self::Endpoints | Self::NodeEndpoints | Self::Affinity => Leads::To(&[Address, Port]),
            Self::ServicePorts | Self::NodeServicePorts => Leads::To(&[Address, Protocol, Port]),
            Self::Members
            | Self::MembersExternal
            | Self::MembersInternal
            | Self::Sources
            | Self::NodeAddresses
            | Self::ClusterIps
            | Self::Hairpin => Leads::Nowhere,
        }
    }

    /// Whether the last part of a key is a range.
    pub(super) fn has_ranges(self) -> bool {
        self == Self::Sources
    }

    /// Whether the kernel writes it, and not we.
    pub(super) fn is_dynamic(self) -> bool {
        self == Self::Affinity
    }
}

/// The length of a key or a value, in bytes.
pub(super) fn length(fields: &[Field], family: Family) -> usize {
    fields.iter().map(|it| it.length(family).next_multiple_of(4)).sum()
}

/// A key or a value, part by part.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Bytes(pub(super) Vec<u8>);

impl Bytes {
    /// Of nothing yet.
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// An address follows.
    pub(super) fn address(mut self, address: IpAddr) -> Self {
        match address {
            IpAddr::V4(it) => self.0.extend(it.octets()),
            IpAddr::V6(it) => self.0.extend(it.octets()),
        }
        self
    }

    /// A protocol follows.
    pub(super) fn protocol(mut self, protocol: Protocol) -> Self {
        self.0.extend([number(protocol), 0, 0, 0]);
        self
    }

    /// A port follows.
    pub(super) fn port(mut self, port: u16) -> Self {
        let [high, low] = port.to_be_bytes();
        self.0.extend([high, low, 0, 0]);
        self
    }

    /// A number follows.
    pub(super) fn number(mut self, number: u32) -> Self {
        self.0.extend(number.to_ne_bytes());
        self
    }
}

/// Takes a key or a value apart again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts<'a> {
    rest: &'a [u8],
    family: Family,
}

impl<'a> Parts<'a> {
    /// Of a whole key or value.
    pub(super) fn of(bytes: &'a Bytes, family: Family) -> Self {
        Self { rest: &bytes.0, family }
    }

    /// The next part, an address.
    pub(super) fn address(&mut self) -> Option<IpAddr> {
        match self.family {
            Family::V4 => self.take::<4>().map(IpAddr::from),
            Family::V6 => self.take::<16>().map(IpAddr::from),
        }
    }

    /// The next part, a protocol by its number.
    pub(super) fn protocol(&mut self) -> Option<u8> {
        self.take::<4>().map(|[it, ..]| it)
    }

    /// The next part, a port.
    pub(super) fn port(&mut self) -> Option<u16> {
        self.take::<4>().map(|[high, low, ..]| u16::from_be_bytes([high, low]))
    }

    /// The next part, a number.
    pub(super) fn number(&mut self) -> Option<u32> {
        self.take::<4>().map(u32::from_ne_bytes)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*taken)
    }
}

/// The IP protocol number.
pub(super) fn number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
        Protocol::Sctp => 132,
    }
}
