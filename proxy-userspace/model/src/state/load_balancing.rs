//! How connections to a Service are spread over its endpoints, beyond what its spec says.

use std::num::{NonZeroU8, NonZeroU16, NonZeroU32};

use super::ExternalForwarding;

/// How connections to a Service are spread over its endpoints: from its annotations, beyond what its spec says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadBalancing {
    pub algorithm: Algorithm,
    pub passive_health: PassiveHealth,
    /// Seconds over which the share of a new endpoint grows, at most [`MAX_SLOW_START`](Self::MAX_SLOW_START); it has
    /// its full share at once if `None`.
    pub slow_start: Option<NonZeroU16>,
    /// Seconds after which TCP connections to an endpoint that left the Service are ended, at most
    /// [`MAX_DRAIN`](Self::MAX_DRAIN); they are kept if `None`.
    pub drain: Option<NonZeroU32>,
    /// Whether sockets leave UDP to the packet path, where there is one: a connected socket survives its endpoint.
    pub udp_to_packets: bool,
    /// What becomes of packets from outside; the default of the brain if `None`.
    pub external_forwarding: Option<ExternalForwarding>,
}

impl LoadBalancing {
    /// The largest `slow_start`: an hour, in seconds.
    pub const MAX_SLOW_START: u16 = 3_600;
    /// The largest `drain`: a day, in seconds.
    pub const MAX_DRAIN: u32 = 86_400;
}

/// How an endpoint is selected for a new connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Algorithm {
    /// Each endpoint with the same probability.
    #[default]
    Random,
    /// Of two random endpoints the one to which this node has fewer connections.
    LeastConnections,
}

/// Whether and when endpoints that fail are ejected: each the node's default if `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassiveHealth {
    /// Whether endpoints are ejected at all.
    pub enabled: Option<bool>,
    /// Consecutive failures after which an endpoint is ejected, at most [`MAX_FAILURES`](Self::MAX_FAILURES).
    pub failures: Option<NonZeroU8>,
    /// How much of a set may be ejected, 1 to 100 percent; the last endpoint never is.
    pub max_ejected_percent: Option<NonZeroU8>,
}

impl PassiveHealth {
    /// The largest `failures`.
    pub const MAX_FAILURES: u8 = 50;
}
