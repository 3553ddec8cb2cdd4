//! The translation of a connected socket, kept per socket and freed with it.
//!
//! The layout outlasts upgrades (see [`crate::SOCK_NAT_VERSION`]): it grows only into `reserved`, which stays zero until
//! then.

#[cfg(feature = "user")]
use bytemuck::{Pod, Zeroable};

use crate::net::SockAddr;

/// One translation: the destination that the program asked for, and the backend that replaced it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct SockNat {
    /// The address of the Service.
    pub service: SockAddr,
    /// The address of the backend.
    pub backend: SockAddr,
}

/// The socket storage of a connected socket (TCP or UDP) without a slot.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct ConnectedNat {
    /// The translation of its connect; unset after a connect that was not translated.
    pub nat: SockNat,
    /// For later versions.
    pub reserved: [u32; 6],
}

/// A slot for the translation of one connected socket, found by the socket's cookie modulo the number of slots.
///
/// A socket whose slot is taken uses socket storage instead ([`ConnectedNat`]), so that nothing is ever evicted.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct NatSlot {
    /// 0 if the slot is free, 1 if a socket owns it; more for a moment, while other sockets try to claim it.
    pub claims: u64,
    /// The cookie of the socket that owns it, or owned it last.
    pub cookie: u64,
    /// The translation of that socket's connect; unset after a connect that was not translated.
    pub nat: SockNat,
    /// For later versions.
    pub reserved: u64,
}

const _: () = assert!(size_of::<SockNat>() == 40);
const _: () = assert!(size_of::<ConnectedNat>() == 64);
const _: () = assert!(size_of::<NatSlot>() == 64);
