//! The contents of the tables that a state calls for, and the protocol of their two sides.
//!
//! May know: states, and the layouts of proxy-common. Reaches maps only through the trait [`MapStore`](store::MapStore).

pub(crate) mod allowed_backends;
pub(crate) mod compile;
pub(crate) mod counter_alloc;
pub(crate) mod double_buffer;
pub(crate) mod layout;
pub(crate) mod maglev;
pub(crate) mod map_updates;
pub(crate) mod node_addresses;
pub(crate) mod peers;
pub(crate) mod store;
pub(crate) mod table_family;
