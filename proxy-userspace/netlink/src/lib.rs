//! What is asked of the kernel over netlink: nf_tables and conntrack, sockets, host addresses; and network namespaces.

mod attribute;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod multicast;
mod netfilter;
mod socket;

pub mod conntrack;
pub mod flow_cleanup;
pub mod host_addresses;
#[cfg(test)]
mod in_netns;
pub mod links;
pub mod netns;
pub mod nf_tables;
pub mod sock_diag;
pub mod uapi;

pub use attribute::{Attribute, each, find, text, u32};
pub use multicast::{ChangeFlag, MulticastListener, Notifications};
pub use netfilter::{Batch, Message, Netfilter, Refused};
