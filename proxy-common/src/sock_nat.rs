//! The translation of a socket, kept in a slot that is found by the socket's cookie.
//!
//! Invariant: a slot belongs to one socket from its claim to the socket's release, and holds one translation: that of its
//! connect, or of the first Service address that it sends to unconnected. Whatever has no slot is in
//! [`overflow`](crate::overflow).
//! The layout outlasts upgrades (see [`crate::SOCK_NAT_VERSION`]).

use crate::{
    health::{Client, Watch},
    net::SockAddr,
};

/// One translation: the destination that the program asked for, and the backend that replaced it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct SockNat {
    pub service: SockAddr,
    pub backend: SockAddr,
}

/// A slot for the translation of one socket, found by the socket's cookie modulo the number of slots.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct NatSlot {
    /// 0 if the slot is free, 1 if a socket owns it; briefly more while other sockets try to claim it.
    pub claims: u32,
    /// How many sockets whose cookie leads to this slot have entries in the overflow table.
    pub overflowed: u32,
    /// The cookie of the socket that owns it, or owned it last.
    pub cookie: u64,
    /// The translation of that socket; unset if it has none now.
    pub nat: SockNat,
    /// Of the translation of a connect: which failures it reports; of that of datagrams: [`Watch::UNCONNECTED`].
    pub watch: Watch,
    pub client: Client,
}

impl NatSlot {
    /// Whether the translation is of datagrams of an unconnected socket, rather than of a connect.
    #[inline(always)]
    pub fn is_unconnected(&self) -> bool {
        self.watch == Watch::UNCONNECTED
    }

    /// The translation of the socket's connect; unset if it has none.
    #[inline(always)]
    pub fn connected(&self) -> SockNat {
        if self.is_unconnected() { SockNat::default() } else { self.nat }
    }

    /// The translation of the socket's datagrams; unset if it has none.
    #[inline(always)]
    pub fn unconnected(&self) -> SockNat {
        if self.is_unconnected() { self.nat } else { SockNat::default() }
    }
}

/// How many cells count the slots of network namespaces, a power of two. Namespaces share a cell by a hash of their cookie:
/// a socket that finds its cell's share used up is served from the overflow table, where each namespace counts for itself.
pub const SLOT_SHARE_CELLS: u32 = 1024;

/// The cell in which the slots of a client are counted.
#[inline(always)]
pub const fn share_cell(client: Client) -> u32 {
    client & (SLOT_SHARE_CELLS - 1)
}

/// How many of all slots the namespaces of one cell may use.
#[inline(always)]
pub const fn slot_share(slots: u32) -> u64 {
    let share = slots as u64 / 4;
    if share == 0 { 1 } else { share }
}

const _: () = assert!(size_of::<SockNat>() == 40);
const _: () = assert!(size_of::<NatSlot>() == 64);
