//! Session affinity: which backend a client was given last, per service port.
//!
//! The layout outlasts upgrades (see [`crate::AFFINITY_VERSION`]), and so does what it holds: a service port is known by
//! a hash of its name, and a backend by its address, whatever ids a generation gives them.

#[cfg(feature = "user")]
use bytemuck::{Pod, Zeroable};

use crate::{net::V6, socket::Address};

/// Who asks for affinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// The address that its socket is bound to, v4 ones v4-mapped.
    Address(V6),
    /// The network namespace of a socket that is not bound, by its cookie: a pod, or the node with all that share its
    /// addresses.
    Namespace(u64),
}

/// What an affinity is found by.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct AffinityKey {
    /// The client: its address, or its namespace's cookie and zeroes.
    pub client: [u32; 4],
    /// The service port ([`crate::tables::Frontend::service`]).
    pub service: u64,
    /// 1 if the client is an address, 0 if it is a namespace.
    pub is_address: u32,
    /// The IP version of the connection, 4 or 6: its backends are others.
    pub family: u32,
}

impl AffinityKey {
    /// The affinity of `client` to a service port.
    #[inline(always)]
    pub const fn new(client: Client, service: u64, family: u32) -> Self {
        match client {
            Client::Address(address) => Self { client: address.raw(), service, is_address: 1, family },
            Client::Namespace(cookie) => {
                Self { client: [cookie as u32, (cookie >> 32) as u32, 0, 0], service, is_address: 0, family }
            }
        }
    }
}

/// The backend that a client was given last.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Affinity {
    /// The backend.
    pub backend: Address,
    /// Always zero.
    pub zero: u32,
    /// When: nanoseconds of the monotonic clock; 0 for never.
    pub used: u64,
}

impl Affinity {
    /// Whether it still counts, `seconds` being the time-out.
    #[inline(always)]
    pub const fn is_alive(&self, now: u64, seconds: u32) -> bool {
        // Another CPU may have been here a moment later than `now`.
        self.used != 0 && now.saturating_sub(self.used) < seconds as u64 * 1_000_000_000
    }
}

const _: () = assert!(size_of::<AffinityKey>() == 32);
const _: () = assert!(size_of::<Affinity>() == 32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_affinity_ends_with_its_time_out_to_the_nanosecond() {
        let affinity = Affinity { used: 5, ..Affinity::default() };
        assert!(affinity.is_alive(5, 1));
        assert!(affinity.is_alive(4, 1));
        assert!(affinity.is_alive(1_000_000_004, 1));
        assert!(!affinity.is_alive(1_000_000_005, 1));
        assert!(affinity.is_alive(86_400_000_000_000, 86_400));
        assert!(!Affinity::default().is_alive(5, 1));
    }
}
