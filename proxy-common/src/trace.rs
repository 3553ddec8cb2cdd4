//! What the traced variant of the programs reports of each decision.
//!
//! Invariant: an event is complete in itself. One that reports the end of a connection repeats what was reported of its
//! beginning.

use crate::{
    counters::CounterIndex,
    net::{Be16, SockAddr, V6},
};

/// A decision on a connect or a send, or the end of a connection. Times are in nanoseconds of the monotonic clock.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct Event {
    /// When the decision was made.
    pub time: u64,
    /// The cookie of the socket.
    pub socket: u64,
    /// The cookie of its network namespace.
    pub netns: u64,
    /// The id of the cgroup of the process.
    pub cgroup: u64,
    /// When the connection was established; 0 if it was not, or no program watches connections.
    pub established: u64,
    /// When the connection ended; 0 in an event of its beginning.
    pub ended: u64,
    /// The name of the process, filled up with zeroes.
    pub process: [u8; 16],
    /// The destination that the process asked for.
    pub destination: SockAddr,
    /// The backend that replaced it; unset if none did.
    pub backend: SockAddr,
    pub pid: u32,
    /// The first counter of the service port; [`NO_COUNTER`](crate::counters::NO_COUNTER) if it belongs to none.
    pub port_counter: CounterIndex,
    /// How the backend was chosen: [`AFFINITY`] and its neighbors.
    pub notes: u32,
    pub protocol: u8,
    /// [`CONNECT`] or [`SEND`].
    pub call: u8,
    /// [`REDIRECTED`] or one of its neighbors.
    pub verdict: u8,
    /// [`CLOSED`] or one of its neighbors; 0 in an event of the beginning of a connection.
    pub end: u8,
}

/// The first packet of a connection, or a datagram, that this node sends on to another one; addresses of IPv4 are v4-mapped.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct SentPacket {
    pub source: V6,
    /// The address of the Service.
    pub destination: V6,
    /// The address of the node that serves it; unspecified if that has left the cluster.
    pub node: V6,
    pub source_port: Be16,
    pub destination_port: Be16,
    /// The number of the interface at which it arrived.
    pub interface: u32,
    /// Its row among those of the frontend, from 0 on.
    pub row: u32,
    /// How many rows the frontend has, less one.
    pub mask: u32,
    /// The IP protocol number, in all four bytes.
    pub protocol: u32,
}

pub const CONNECT: u8 = 1;
/// The call was `sendto(2)` or `sendmsg(2)` of an unconnected socket.
pub const SEND: u8 = 2;

/// The destination is no frontend.
pub const PASSED: u8 = 1;
/// The process or its network namespace is excluded.
pub const EXCLUDED: u8 = 2;
/// The call is left to the packet path, as one of the kernel's own sockets or one about which only NAT knows enough.
pub const LEFT_TO_PACKETS: u8 = 3;
pub const REDIRECTED: u8 = 4;
/// The Service has no backends.
pub const NO_BACKENDS: u8 = 5;
/// There is no room for the translation.
pub const NO_ROOM: u8 = 6;

/// The process closed the socket.
pub const CLOSED: u8 = 1;
/// The backend closed the connection first.
pub const CLOSED_BY_BACKEND: u8 = 2;
/// The connection was reset after it was established, or timed out.
pub const RESET: u8 = 3;
/// The backend refused the connection.
pub const REFUSED: u8 = 4;
pub const NO_ANSWER: u8 = 5;
/// The process closed the socket before the backend had answered.
pub const GIVEN_UP: u8 = 6;

/// The Service has session affinity.
pub const AFFINITY: u32 = 1 << 0;
/// The client's last backend was used.
pub const AFFINITY_KEPT: u32 = 1 << 1;
/// The backend that was chosen first is ejected for this client, and another one was used.
pub const EJECTED_AVOIDED: u32 = 1 << 2;
/// The backend was ejected for this client: it is tried again, or no other one may be used.
pub const EJECTED_TRIED: u32 = 1 << 3;
/// The backend with fewer connections was used.
pub const LEAST_CONNECTIONS: u32 = 1 << 4;
/// New backends get fewer connections.
pub const SLOW_START: u32 = 1 << 5;
/// It is a further datagram to the same backend.
pub const FURTHER_DATAGRAM: u32 = 1 << 6;

/// Whether a verdict fails the call.
#[inline(always)]
pub const fn is_failure(verdict: u8) -> bool {
    verdict >= NO_BACKENDS
}

/// Whether a connection was never established.
#[inline(always)]
pub const fn is_failed_end(end: u8) -> bool {
    end >= REFUSED
}

/// The index of the number of lines of log that were said, lost ones included.
pub const LINES_SAID: u32 = 0;
/// The index of what is not zero while lines are counted as said and not written.
pub const LINES_PAUSED: u32 = 1;

/// The size of the ring buffer in bytes: room for 8,192 events.
pub const RING_BYTES: usize = 1 << 20;
/// The size of the ring buffer of [`SentPacket`]s in bytes: room for about 800.
pub const SENT_BYTES: usize = 1 << 16;
/// How many frontends a trace can follow packets to.
pub const MAX_FRONTENDS: u32 = 4096;
/// How many connections are remembered until they end; the least recently used one is forgotten first.
pub const MAX_OPEN: u32 = 16_384;
/// How many service ports a trace can be restricted to.
pub const MAX_PORTS: u32 = 1024;

const _: () = assert!(size_of::<Event>() == 120 && size_of::<SentPacket>() == 68);
