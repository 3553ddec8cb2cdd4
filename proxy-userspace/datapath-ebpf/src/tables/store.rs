//! The maps of a datapath, as a trait: [`crate::maps::bpf_maps`] implements it in the kernel, `fake_maps` in memory.

use std::fmt;

use proxy_common::{
    counters::CounterIndex,
    forward::{Forward, ForwardNode, RowPair},
    net::V6,
    tables::{
        BackendEntry4, BackendEntry6, BackendSetMember, BackendSetMemberKey4, BackendSetMemberKey6, Frontend,
        FrontendKey4, FrontendKey6, NodeAddrScope, NodePortKey, Prefilter,
    },
};

use crate::{error::Error, host::raw_bpf::EntrySize};

/// One of the two sides, each a full set of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Side(u32);

impl Side {
    pub(crate) const BOTH: [Self; 2] = [Self(0), Self(1)];

    /// The side that an active-side word selects; `None` if the word is invalid.
    pub(crate) fn from_word(word: u32) -> Option<Self> {
        (word < 2).then_some(Self(word))
    }

    /// The active-side word that selects it.
    pub(crate) fn word(self) -> u32 {
        self.0
    }

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }

    #[must_use]
    pub(crate) fn other(self) -> Self {
        Self(1 - self.0)
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Defines the tables: of each its name in pin paths, that of its outer map in the kernel object, and the types of its entries.
macro_rules! tables {
    ($($(#[$doc:meta])* $table:ident: $name:literal, $map:literal, $key:ty => $value:ty;)*) => {
        /// One table, of which each side has a map.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub(crate) enum Table {
            $(
                #[doc = concat!("[`", stringify!($key), "`] to [`", stringify!($value), "`].")]
                $(#[$doc])*
                $table,
            )*
        }

        impl Table {
            /// All tables; a table's position is its [`Table::index`].
            pub(crate) const ALL: [Self; Self::COUNT] = [$(Self::$table),*];
        }

        /// Of each table, in order: both names, and the size of its entries.
        const MAPS: [(&str, &str, EntrySize); Table::COUNT] =
            [$(($name, $map, EntrySize::of::<$key, $value>())),*];
    };
}

tables! {
    Frontends4: "frontends4", "FRONTENDS4", FrontendKey4 => Frontend;
    Frontends6: "frontends6", "FRONTENDS6", FrontendKey6 => Frontend;
    NodePorts: "node_ports", "NODE_PORTS", NodePortKey => Frontend;
    /// By address, IPv4 as v4-mapped.
    NodeAddrs: "node_addrs", "NODE_ADDRS", V6 => NodeAddrScope;
    /// By position.
    Backends4: "backends4", "BACKENDS4", u32 => BackendEntry4;
    /// By position.
    Backends6: "backends6", "BACKENDS6", u32 => BackendEntry6;
    Members4: "members4", "MEMBERS4", BackendSetMemberKey4 => BackendSetMember;
    Members6: "members6", "MEMBERS6", BackendSetMemberKey6 => BackendSetMember;
    /// IPv4 as v4-mapped.
    Forwards: "forwards", "FORWARDS", FrontendKey6 => Forward;
    /// By the number of a pair of rows.
    ForwardRows: "forward_rows", "FORWARD_ROWS", u32 => RowPair;
    /// By [`NodeNumber`](proxy_common::forward::NodeNumber).
    ForwardNodes: "forward_nodes", "FORWARD_NODES", u32 => ForwardNode;
    /// The numbers of nodes by their addresses, IPv4 as v4-mapped.
    ForwardNumbers: "forward_numbers", "FORWARD_NUMBERS", V6 => u32;
}

impl Table {
    pub(crate) const COUNT: usize = 12;

    /// The tables of packets that are forwarded.
    pub(crate) const FORWARDING: [Self; 4] =
        [Self::Forwards, Self::ForwardRows, Self::ForwardNodes, Self::ForwardNumbers];

    /// Its position in an array of all tables.
    pub(crate) fn index(self) -> usize {
        self as usize
    }

    /// Its name in pin paths.
    pub(crate) fn name(self) -> &'static str {
        MAPS[self.index()].0
    }

    /// The name of its outer map in the kernel object.
    pub(crate) fn map(self) -> &'static str {
        MAPS[self.index()].1
    }

    pub(crate) fn entry(self) -> EntrySize {
        MAPS[self.index()].2
    }

    /// Whether it is an array, in which an unused position is all zeroes; otherwise it is a hash map.
    pub(crate) fn is_array(self) -> bool {
        matches!(self, Self::Backends4 | Self::Backends6 | Self::ForwardRows | Self::ForwardNodes)
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The maps of one datapath.
pub(crate) trait MapStore {
    /// The side that programs read now.
    fn active(&self) -> Result<Side, Error>;

    /// Makes programs read `side` from now on, with one store. A program that sees this store sees all earlier writes.
    fn activate(&mut self, side: Side) -> Result<(), Error>;

    /// Returns when every program that began before the call has ended.
    fn wait_grace_period(&mut self) -> Result<(), Error>;

    /// Replaces maps of a side by empty ones, each with at least this capacity. After an error some may be replaced.
    fn replace(&mut self, side: Side, maps: &[(Table, u32)]) -> Result<(), Error>;

    fn set_prefilter(&mut self, side: Side, prefilter: &Prefilter) -> Result<(), Error>;

    /// Writes new and changed entries; keys and values are each concatenated.
    fn put(&mut self, side: Side, table: Table, keys: &[u8], values: &[u8]) -> Result<(), Error>;

    /// Deletes entries of a hash map, all of which exist.
    fn delete(&mut self, side: Side, table: Table, keys: &[u8]) -> Result<(), Error>;

    /// The owner of every existing counter, in order; 0 for none.
    fn counter_owners(&self) -> Result<Vec<u64>, Error>;

    /// Assigns counters, in ascending order, to new owners, for whom they begin at zero, or to none (0); allocates chunks as
    /// needed. Of several owners of one counter the last one is set. No program may be incrementing these counters.
    /// A backend that is the owner already is back in its Service: its age begins anew, its counter does not.
    fn set_counter_owners(&mut self, owners: &[(CounterIndex, u64)]) -> Result<(), Error>;

    /// The open connections of each counter's backend, in order, as they were counted: negative if some were missed.
    fn open_connections(&self) -> Result<Vec<i64>, Error>;
}
