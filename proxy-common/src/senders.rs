//! The addresses that have just sent a datagram to a socket: what the socket sends there is a reply, whatever the address.
//!
//! Only senders whose address is that of a frontend are kept ([`crate::decide::may_be_hijacked`]): clients with a source port
//! in the range of node ports, or with a load balancer IP. They are known to all sockets at one port of a network namespace,
//! as a server may open a further socket for each client.

use crate::net::{Be16, SockAddr, V6};

/// A sender, and the port that it has sent to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct SenderKey {
    /// The cookie of the receiver's network namespace, its lower half first: a key of 28 bytes leaves room on the stack.
    pub netns: [u32; 2],
    /// The sender's IP address, IPv4 as v4-mapped.
    pub ip: V6,
    pub port: Be16,
    /// The receiver's port, in host byte order.
    pub to: u16,
}

impl SenderKey {
    #[inline(always)]
    pub const fn new(sender: SockAddr, netns: u64, to: u16) -> Self {
        Self { netns: [netns as u32, (netns >> 32) as u32], ip: sender.ip, port: sender.port, to }
    }
}

/// How long a datagram to a sender is a reply, in nanoseconds, since the last datagram of either of both: as long as connection
/// tracking remembers a UDP flow of both directions by default (`nf_conntrack_udp_timeout_stream`).
pub const REPLY_TIME: u64 = 120_000_000_000;

/// For how long a reply leaves the time as it is, in nanoseconds, so that a stream of them does not write it each time.
pub const REFRESH_TIME: u64 = 10_000_000_000;

/// The number of senders that are remembered; the one that was silent longest is forgotten first.
pub const MAX_SENDERS: u32 = 16_384;

const _: () = assert!(size_of::<SenderKey>() == 28);
