//! Session affinity: the backend that each client was given last, per service port.
//!
//! The layout outlasts upgrades (see [`crate::AFFINITY_VERSION`]), and so do the entries: a service port is identified by
//! a hash of its name, and a backend by its address, whatever ids a generation gives them.

use crate::net::{SockAddr, V6};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AffinityClient {
    /// An address of the node that a socket in the node's own network namespace is bound to, IPv4 as v4-mapped.
    Address(V6),
    /// The network namespace of any other socket, by its cookie: a pod, or the node.
    Namespace(u64),
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct AffinityKey {
    /// The client: its address, or the cookie of its namespace followed by zeroes.
    pub client: [u32; 4],
    /// [`crate::tables::Frontend::service_port`].
    pub service_port: u64,
    /// 1 if the client is an address, 0 if it is a namespace.
    pub is_address: u32,
    /// The IP version of the connection, 4 or 6: each has its own backends.
    pub ip_version: u32,
}

impl AffinityKey {
    #[inline(always)]
    pub const fn new(client: AffinityClient, service_port: u64, ip_version: u32) -> Self {
        let (client, is_address) = match client {
            AffinityClient::Address(address) => (address.raw(), 1),
            AffinityClient::Namespace(cookie) => ([cookie as u32, (cookie >> 32) as u32, 0, 0], 0),
        };
        Self { client, service_port, is_address, ip_version }
    }
}

/// The backend that a client was given last.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct AffinityEntry {
    pub backend: SockAddr,
    pub zero: u32,
    /// When the client last used it, in nanoseconds of the monotonic clock; 0 for never.
    pub used: u64,
}

impl AffinityEntry {
    /// Whether the entry has not expired, `timeout` being in seconds.
    #[inline(always)]
    pub const fn is_alive(&self, now: u64, timeout: u32) -> bool {
        // Another CPU may have used it after `now` was read.
        self.used != 0 && now.saturating_sub(self.used) < timeout as u64 * 1_000_000_000
    }
}

const _: () = assert!(size_of::<AffinityKey>() == 32);
const _: () = assert!(size_of::<AffinityEntry>() == 32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_affinity_ends_with_its_time_out_to_the_nanosecond() {
        let entry = AffinityEntry { used: 5, ..AffinityEntry::default() };
        assert!(entry.is_alive(5, 1));
        assert!(entry.is_alive(4, 1));
        assert!(entry.is_alive(1_000_000_004, 1));
        assert!(!entry.is_alive(1_000_000_005, 1));
        assert!(entry.is_alive(86_400_000_000_000, 86_400));
        assert!(!AffinityEntry::default().is_alive(5, 1));
    }
}
