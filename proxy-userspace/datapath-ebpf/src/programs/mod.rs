//! The programs: attached, replaced, traced and probed, and what ends sockets and ejections for them.
//!
//! May know: [`maps`](crate::maps) and below.

pub(crate) mod clsact;
pub(crate) mod hook_status;
pub(crate) mod hooks;
pub(crate) mod links;
pub(crate) mod peer_probes;
pub mod probe;
pub(crate) mod sent_packets;
pub(crate) mod socket_termination;
pub(crate) mod trace;
pub(crate) mod trial_connects;
pub(crate) mod uplink_links;
pub(crate) mod uplinks;
