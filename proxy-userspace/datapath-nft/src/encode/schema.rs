//! The maps and sets of a table: the fields of their elements, and their layout in registers.
//!
//! Invariants: every field of a key begins at a multiple of four bytes, as in the registers it is compared with.
//! `nft` can load again what it lists of them: each field has one of its types, and no number has a half of zero, see [`Field::Number`].

use std::net::{IpAddr, SocketAddr};

use datapath::FrontendAddress;
use model::{Family, Protocol};
use smallvec::SmallVec;

/// Defines the maps, each with its name in the table, the fields of a key, and the data.
macro_rules! maps {
    ($($(#[$doc:meta])* $map:ident: $name:literal, $key:expr, $data:expr;)+) => {
        /// A map or a set.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub(crate) enum Map {
            $($(#[$doc])* $map,)+
        }

        impl Map {
            const ALL: &[Self] = &[$(Self::$map),+];

            pub(crate) fn name(self) -> &'static str {
                match self {
                    $(Self::$map => $name,)+
                }
            }

            pub(crate) fn key(self) -> &'static [Field] {
                match self {
                    $(Self::$map => $key,)+
                }
            }

            pub(crate) fn data(self) -> MapData {
                match self {
                    $(Self::$map => $data,)+
                }
            }
        }
    };
}

maps! {
    /// Frontend → policy.
    Frontends: "frontends", FRONTEND, NUMBER;
    /// Frontend → selector for internal traffic.
    Internal: "internal", FRONTEND, NUMBER;
    /// Frontend → selector for external traffic, where that differs.
    External: "external", FRONTEND, NUMBER;
    /// Frontend that other nodes forward packets to → policy for these packets; [`Map::External`] has their selector.
    Forwarded: "forwarded", FRONTEND, NUMBER;
    /// Frontend that is reachable from outside and has endpoints → counter of the connections of its service port.
    Counted: "counted", FRONTEND, MapData::Counter;
    /// Frontend and slot → endpoint, without session affinity.
    Endpoints: "endpoints", SLOT, ENDPOINT;
    /// Frontend and slot → number of the member, with session affinity.
    AffinityEndpoints: "affinity-endpoints", SLOT, NUMBER;
    /// [`Map::Frontends`] of node ports, at any address.
    NodeFrontends: "node-frontends", NODE_PORT, NUMBER;
    /// [`Map::Internal`] of node ports.
    NodeInternal: "node-internal", NODE_PORT, NUMBER;
    /// [`Map::External`] of node ports.
    NodeExternal: "node-external", NODE_PORT, NUMBER;
    /// [`Map::Counted`] of node ports.
    NodeCounted: "node-counted", NODE_PORT, MapData::Counter;
    /// [`Map::Endpoints`] of node ports.
    NodeEndpoints: "node-endpoints", NODE_SLOT, ENDPOINT;
    /// [`Map::AffinityEndpoints`] of node ports.
    NodeAffinityEndpoints: "node-affinity-endpoints", NODE_SLOT, NUMBER;
    /// Policy → chain.
    Policies: "policies", &[Field::Number], MapData::Verdict;
    /// Selector → chain.
    Selectors: "selectors", &[Field::Number], MapData::Verdict;
    /// [`Map::Selectors`] of node ports.
    NodeSelectors: "node-selectors", &[Field::Number], MapData::Verdict;
    /// Frontend of a service port with session affinity → number of the service port.
    ServicePorts: "service-ports", FRONTEND, NUMBER;
    /// [`Map::ServicePorts`] of node ports.
    NodeServicePorts: "node-service-ports", NODE_PORT, NUMBER;
    /// Client and service port → member, for clients whose connection was answered; written by rules.
    Affinity: "affinity", CLIENT, NUMBER;
    /// Client and frontend → member, for a while before that, by some bits of the client's address.
    AffinityUnanswered: "affinity-unanswered", UNANSWERED, NUMBER;
    /// Service port → timeout of its session affinity in seconds.
    AffinitySeconds: "affinity-seconds", &[Field::Number], NUMBER;
    /// Timeout → chain that writes [`Map::Affinity`].
    AffinityTimeouts: "affinity-timeouts", &[Field::Number], MapData::Verdict;
    /// Service ports with as many clients in [`Map::Affinity`] as one may have; written by user space from time to time.
    AffinityFull: "affinity-full", &[Field::Number], MapData::None;
    /// Protocol and member → endpoint that affinity may keep, for set 0.
    Members: "members", MEMBER, ENDPOINT;
    /// [`Map::Members`] for the set of external traffic.
    MembersExternal: "members-external", MEMBER, ENDPOINT;
    /// [`Map::Members`] for the set of a cluster IP.
    MembersInternal: "members-internal", MEMBER, ENDPOINT;
    /// Frontend that is restricted by source ranges → number of its list.
    SourceLists: "source-lists", FRONTEND, NUMBER;
    /// Number of a list of source ranges → chain that checks it.
    SourceChains: "source-chains", &[Field::Number], MapData::Verdict;
    /// Addresses at which node ports are served.
    NodeAddresses: "node-addresses", &[Field::Address], MapData::None;
    /// UDP endpoints that were removed a moment ago, and to which sockets are still connected.
    RemovedUdp: "removed-udp", &[Field::Address, Field::Port], MapData::None;
    /// The numbers of the interfaces with an address of the node, while there are such endpoints.
    Uplinks: "uplinks", &[Field::Interface], MapData::None;
    /// Which chains see every packet, see [`crate::plan::watch`]; no rule reads it.
    Watches: "watches", &[Field::Number], MapData::None;
    /// Cluster IPs; ports without a Service are rejected there.
    ClusterIps: "cluster-ips", &[Field::Address], MapData::None;
    /// Endpoints on this node, each as source and destination: a hairpin packet must be masqueraded.
    Hairpin: "hairpin", &[Field::Address, Field::Address], MapData::None;
    /// No map: the counters of the table, each known by its name.
    Counters: "counters", &[], MapData::None;
    /// The allowed sources of one list: a set per list, see [`crate::plan::source_list`].
    SourceRanges: "sources", &[Field::Address], MapData::None;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    /// An IP address, in network byte order.
    Address,
    /// An IP protocol number.
    Protocol,
    /// A port, in network byte order.
    Port,
    /// A number as it is kept in a packet's priority, in host byte order.
    ///
    /// `nft` writes it as that of a traffic class, `major:minor`, and cannot read it if one of both is 0.
    Number,
    /// The number of an interface, in host byte order.
    Interface,
}

impl Field {
    /// Its length without padding, in bytes.
    pub(crate) fn length(self, family: Family) -> usize {
        match (self, family) {
            (Self::Address, Family::V4) | (Self::Number | Self::Interface, _) => 4,
            (Self::Address, Family::V6) => 16,
            (Self::Protocol, _) => 1,
            (Self::Port, _) => 2,
        }
    }

    /// The number of its type in nft (`enum datatypes`), which `nft list` uses.
    pub(crate) fn kind(self, family: Family) -> u32 {
        match (self, family) {
            (Self::Address, Family::V4) => 7,
            (Self::Address, Family::V6) => 8,
            (Self::Protocol, _) => 12,
            (Self::Port, _) => 13,
            (Self::Number, _) => 23,
            (Self::Interface, _) => 20,
        }
    }

    /// The byte order of its values as nft numbers it (`enum byteorder`).
    pub(crate) fn byte_order(self) -> u32 {
        match self {
            Self::Protocol | Self::Number | Self::Interface => 1,
            Self::Address | Self::Port => 2,
        }
    }
}

/// How long an unanswered client keeps its endpoint: about as long as it takes to connect with a few repetitions.
pub(crate) const UNANSWERED_SECONDS: u32 = 30;
/// The timeout of session affinity of a Service that has no other.
const DEFAULT_AFFINITY_SECONDS: u32 = 10_800;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MapData {
    /// None: it is a set.
    None,
    Fields(&'static [Field]),
    Verdict,
    /// The name of a counter of the table.
    Counter,
}

const FRONTEND: &[Field] = &[Field::Address, Field::Protocol, Field::Port];
const NODE_PORT: &[Field] = &[Field::Protocol, Field::Port];
const SLOT: &[Field] = &[Field::Address, Field::Protocol, Field::Port, Field::Number];
const NODE_SLOT: &[Field] = &[Field::Protocol, Field::Port, Field::Number];
const CLIENT: &[Field] = &[Field::Address, Field::Number];
const UNANSWERED: &[Field] = &[Field::Address, Field::Address, Field::Protocol, Field::Port];
const MEMBER: &[Field] = &[Field::Protocol, Field::Number];
const ENDPOINT: MapData = MapData::Fields(&[Field::Address, Field::Port]);
const NUMBER: MapData = MapData::Fields(&[Field::Number]);

impl Map {
    /// Those of which every table has exactly one: all but [`Map::SourceRanges`] and [`Map::Counters`].
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(|it| !it.has_ranges() && !it.is_counters())
    }

    /// The endpoints of the set of a number that may be kept.
    pub(crate) fn members(set: u32) -> Self {
        match set {
            0 => Self::Members,
            1 => Self::MembersExternal,
            _ => Self::MembersInternal,
        }
    }

    /// The map of the same for node ports. There has to be one.
    pub(crate) fn of_node_ports(self) -> Self {
        match self {
            Self::Frontends => Self::NodeFrontends,
            Self::Internal => Self::NodeInternal,
            Self::External => Self::NodeExternal,
            Self::Counted => Self::NodeCounted,
            Self::Endpoints => Self::NodeEndpoints,
            Self::AffinityEndpoints => Self::NodeAffinityEndpoints,
            Self::Selectors => Self::NodeSelectors,
            Self::ServicePorts => Self::NodeServicePorts,
            other => {
                debug_assert!(false, "{other:?} has no counterpart for node ports");
                other
            }
        }
    }

    /// Whether its elements are the boundaries of ranges.
    pub(crate) fn has_ranges(self) -> bool {
        self == Self::SourceRanges
    }

    /// Whether it stands for the counters of the table, by name.
    pub(crate) fn is_counters(self) -> bool {
        self == Self::Counters
    }

    /// Whether its elements expire: it follows the traffic, not the state.
    pub(crate) fn is_dynamic(self) -> bool {
        matches!(self, Self::Affinity | Self::AffinityUnanswered | Self::AffinityFull | Self::RemovedUdp)
    }

    /// After how many seconds an element expires that gets no other time: `nft` 1.0.2 loses the times of rules that it loads.
    pub(crate) fn default_timeout(self) -> Option<u32> {
        match self {
            Self::Affinity => Some(DEFAULT_AFFINITY_SECONDS),
            Self::AffinityUnanswered => Some(UNANSWERED_SECONDS),
            _ => None,
        }
    }
}

/// The name of the set of a list of source ranges, and of the chain that looks into it.
pub(crate) fn list_name(list: u32) -> String {
    format!("sources-{list:08x}")
}

/// Parses what [`list_name`] returns.
pub(crate) fn list_of(name: &str) -> Option<u32> {
    u32::from_str_radix(name.strip_prefix("sources-")?, 16).ok()
}

/// The length of a key or a value, in bytes.
pub(crate) fn length(fields: &[Field], family: Family) -> usize {
    fields.iter().map(|it| it.length(family).next_multiple_of(4)).sum()
}

/// A key or a value under construction, to which fields are appended.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Bytes(pub(crate) SmallVec<[u8; 24]>);

impl Bytes {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn frontend(FrontendAddress { address, protocol }: FrontendAddress) -> Self {
        Self::new().address(address.ip()).protocol(protocol).port(address.port())
    }

    pub(crate) fn name(text: &str) -> Self {
        Self(text.as_bytes().into())
    }

    pub(crate) fn endpoint(endpoint: SocketAddr) -> Self {
        Self::new().address(endpoint.ip()).port(endpoint.port())
    }

    pub(crate) fn address(mut self, address: IpAddr) -> Self {
        match address {
            IpAddr::V4(it) => self.0.extend(it.octets()),
            IpAddr::V6(it) => self.0.extend(it.octets()),
        }
        self
    }

    pub(crate) fn protocol(mut self, protocol: Protocol) -> Self {
        self.0.extend([protocol.number(), 0, 0, 0]);
        self
    }

    pub(crate) fn port(mut self, port: u16) -> Self {
        let [high, low] = port.to_be_bytes();
        self.0.extend([high, low, 0, 0]);
        self
    }

    pub(crate) fn number(mut self, number: u32) -> Self {
        self.0.extend(number.to_ne_bytes());
        self
    }
}

/// Parses a key or a value, field by field.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts<'a> {
    rest: &'a [u8],
    family: Family,
}

impl<'a> Parts<'a> {
    pub(crate) fn of(bytes: &'a Bytes, family: Family) -> Self {
        Self { rest: &bytes.0, family }
    }

    pub(crate) fn address(&mut self) -> Option<IpAddr> {
        match self.family {
            Family::V4 => self.take::<4>().map(IpAddr::from),
            Family::V6 => self.take::<16>().map(IpAddr::from),
        }
    }

    pub(crate) fn protocol(&mut self) -> Option<u8> {
        self.take::<4>().map(|[it, ..]| it)
    }

    pub(crate) fn port(&mut self) -> Option<u16> {
        self.take::<4>().map(|[high, low, ..]| u16::from_be_bytes([high, low]))
    }

    pub(crate) fn number(&mut self) -> Option<u32> {
        self.take::<4>().map(u32::from_ne_bytes)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*taken)
    }
}
