//! The maps a data plane is made of, as a trait: the kernel is one implementation, memory another.

use std::fmt;

use proxy_common::{
    counters::CounterIndex,
    net::V6,
    tables::{
        BackendEntry4, BackendEntry6, BackendSetMember, BackendSetMemberKey4, BackendSetMemberKey6, Frontend,
        FrontendKey4, FrontendKey6, NodeAddrScope, NodePortKey, Prefilter,
    },
};

use crate::error::Error;

/// One of the two sides, each a full set of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Side(u32);

impl Side {
    /// Both of them.
    pub(super) const BOTH: [Self; 2] = [Self(0), Self(1)];

    /// From the side word; `None` if it names no side.
    pub(super) fn from_word(word: u32) -> Option<Self> {
        (word < 2).then_some(Self(word))
    }

    /// The side word that selects it.
    pub(super) fn word(self) -> u32 {
        self.0
    }

    /// Its position in an array of two.
    pub(super) fn index(self) -> usize {
        self.0 as usize
    }

    /// The other one.
    #[must_use]
    pub(super) fn other(self) -> Self {
        Self(1 - self.0)
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// One table, of which each side has a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Table {
    /// [`FrontendKey4`] to [`Frontend`].
    Frontends4,
    /// [`FrontendKey6`] to [`Frontend`].
    Frontends6,
    /// [`NodePortKey`] to [`Frontend`].
    NodePorts,
    /// An address, v4 ones v4-mapped, to its [`NodeAddrScope`].
    NodeAddrs,
    /// A position to [`BackendEntry4`].
    Backends4,
    /// A position to [`BackendEntry6`].
    Backends6,
    /// [`BackendSetMemberKey4`] to [`BackendSetMember`].
    Members4,
    /// [`BackendSetMemberKey6`] to [`BackendSetMember`].
    Members6,
}

impl Table {
    /// How many tables a side has.
    pub(super) const COUNT: usize = 8;
    /// All of them; a table's position is its [`Table::index`].
    pub(super) const ALL: [Self; Self::COUNT] = [
        Self::Frontends4,
        Self::Frontends6,
        Self::NodePorts,
        Self::NodeAddrs,
        Self::Backends4,
        Self::Backends6,
        Self::Members4,
        Self::Members6,
    ];

    /// Its position in an array of all tables.
    pub(super) fn index(self) -> usize {
        self as usize
    }

    /// Its name in pin paths.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Frontends4 => "frontends4",
            Self::Frontends6 => "frontends6",
            Self::NodePorts => "node_ports",
            Self::NodeAddrs => "node_addrs",
            Self::Backends4 => "backends4",
            Self::Backends6 => "backends6",
            Self::Members4 => "members4",
            Self::Members6 => "members6",
        }
    }

    /// The name of its outer map in the kernel object.
    pub(super) fn map(self) -> &'static str {
        match self {
            Self::Frontends4 => "FRONTENDS4",
            Self::Frontends6 => "FRONTENDS6",
            Self::NodePorts => "NODE_PORTS",
            Self::NodeAddrs => "NODE_ADDRS",
            Self::Backends4 => "BACKENDS4",
            Self::Backends6 => "BACKENDS6",
            Self::Members4 => "MEMBERS4",
            Self::Members6 => "MEMBERS6",
        }
    }

    /// Whether it is an array, in which every position is there, and zeroes stand for nothing; else it is a hash map.
    pub(super) fn is_array(self) -> bool {
        matches!(self, Self::Backends4 | Self::Backends6)
    }

    /// The size of a key in bytes.
    pub(super) fn key_size(self) -> usize {
        match self {
            Self::Frontends4 => size_of::<FrontendKey4>(),
            Self::Frontends6 => size_of::<FrontendKey6>(),
            Self::NodePorts => size_of::<NodePortKey>(),
            Self::NodeAddrs => size_of::<V6>(),
            Self::Backends4 | Self::Backends6 => size_of::<u32>(),
            Self::Members4 => size_of::<BackendSetMemberKey4>(),
            Self::Members6 => size_of::<BackendSetMemberKey6>(),
        }
    }

    /// The size of a value in bytes.
    pub(super) fn value_size(self) -> usize {
        match self {
            Self::Frontends4 | Self::Frontends6 | Self::NodePorts => size_of::<Frontend>(),
            Self::NodeAddrs => size_of::<NodeAddrScope>(),
            Self::Backends4 => size_of::<BackendEntry4>(),
            Self::Backends6 => size_of::<BackendEntry6>(),
            Self::Members4 | Self::Members6 => size_of::<BackendSetMember>(),
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The maps of one data plane.
pub(super) trait Store {
    /// The side that programs read now.
    fn active(&self) -> Result<Side, Error>;

    /// Makes programs read `side` from now on, with one store. Everything written before is seen by whoever sees it.
    fn activate(&mut self, side: Side) -> Result<(), Error>;

    /// Returns when every program that began before the call has ended.
    fn grace(&mut self) -> Result<(), Error>;

    /// Puts empty maps in the place of a side's maps, each for at least so many entries. On an error, some may be there.
    fn replace(&mut self, side: Side, maps: &[(Table, u32)]) -> Result<(), Error>;

    /// Says where the frontends of a side may be.
    fn set_prefilter(&mut self, side: Side, prefilter: &Prefilter) -> Result<(), Error>;

    /// Writes entries, new ones and changed ones; keys and values lie one after the other.
    fn put(&mut self, side: Side, table: Table, keys: &[u8], values: &[u8]) -> Result<(), Error>;

    /// Deletes entries of a hash map, all of which are there.
    fn delete(&mut self, side: Side, table: Table, keys: &[u8]) -> Result<(), Error>;

    /// The owner of each cell that there is, in order; 0 for nobody.
    fn owners(&self) -> Result<Vec<u64>, Error>;

    /// Gives cells, which are in order, to owners, who begin at zero, or to nobody; makes room where there is none. Of a cell
    /// that is there twice the last owner counts. No program may be adding to them.
    fn own(&mut self, cells: &[(CounterIndex, u64)]) -> Result<(), Error>;
}
