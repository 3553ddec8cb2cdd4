//! What becomes of connections while the forwarding of a port begins and ends.
//!
//! Invariant: a TCP connection goes on the way it began, if the packet path gives those that it does not know a second chance.

use model::{Family, state::NodeState};
use proxy_common::forward::{ESTABLISHED_ONLY, KNOWN_FIRST};

/// How far the forwarding of a port is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Packets are translated.
    Translated,
    /// Forwarding has begun, and this node may know connections that it has translated.
    Begun,
    /// All packets are forwarded.
    Forwarded,
    /// Forwarding has ended: only connections that exist are forwarded, if they are not known here.
    Ended,
}

impl Stage {
    /// The stage of the rows of an earlier process.
    pub(super) const fn of(flags: u32, has_owners: bool) -> Self {
        match has_owners {
            false => Self::Translated,
            true if flags & ESTABLISHED_ONLY != 0 => Self::Ended,
            true if flags & KNOWN_FIRST != 0 => Self::Begun,
            true => Self::Forwarded,
        }
    }

    /// The flags of [`Forward`](proxy_common::forward::Forward).
    pub(super) const fn flags(self) -> u32 {
        match self {
            Self::Translated | Self::Forwarded => 0,
            Self::Begun => KNOWN_FIRST,
            Self::Ended => KNOWN_FIRST | ESTABLISHED_ONLY,
        }
    }

    /// Whether new connections are forwarded.
    pub(super) const fn is_forwarded(self) -> bool {
        matches!(self, Self::Begun | Self::Forwarded)
    }

    /// The stage after this one while nodes serve; `can_keep` tells whether connections can be told apart.
    pub(super) const fn forwarded(self, can_keep: bool) -> Self {
        match self {
            Self::Translated | Self::Begun | Self::Ended if can_keep => Self::Begun,
            _ => Self::Forwarded,
        }
    }
}

/// What the packet path of this node has. Rows follow it, so that it expects what they bring.
#[derive(Clone, Debug, Default)]
pub enum PacketPath {
    /// It is off.
    #[default]
    Off,
    /// It has no state of this process yet: what an earlier one forwarded is forwarded.
    Starting,
    /// This state.
    Has {
        state: NodeState,
        /// The families in which connections that it does not know get a second chance.
        second_chance: Vec<Family>,
    },
}

impl PacketPath {
    /// Whether connections that this node knows can be told from others.
    pub(super) fn knows_connections(&self, family: Family) -> bool {
        match self {
            Self::Off => false,
            Self::Starting => true,
            Self::Has { second_chance, .. } => second_chance.contains(&family),
        }
    }
}
