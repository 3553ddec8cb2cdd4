//! What is asked of the kernel over netlink: nf_tables and conntrack, sockets, host addresses; and network namespaces.

mod attribute;
mod conntrack;
mod multicast;
mod netfilter;
mod nf_tables;
mod socket;

pub mod flow_cleanup;
pub mod host_addresses;
pub mod netns;
pub mod sock_diag;

pub use attribute::{Attribute, each, find, text, u32};
pub use multicast::{ChangeFlag, MulticastListener};
pub use netfilter::{Message, NFGENMSG, Netfilter, Refused};
pub use nf_tables::{Chain, Rule, chains, rules};
