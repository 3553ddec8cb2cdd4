//! What a socket remembers of its translations, kept in its own storage and gone with it.
//!
//! Addresses are v6 throughout, v4 ones v4-mapped: a v6 socket that sends to `::ffff:a.b.c.d` runs the v4 hook and
//! receives its reply in the v6 one.
//! The layout outlasts upgrades (see [`crate::SOCKETS_VERSION`]): it grows only into `reserved`, which stays zero until
//! then.

#[cfg(feature = "user")]
use bytemuck::{Pod, Zeroable};

use crate::net::{Be16, V6};

/// A socket address, v4 ones v4-mapped.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Address {
    /// The IP address.
    pub ip: V6,
    /// The port.
    pub port: Be16,
    /// Always zero.
    pub zero: u16,
}

impl Address {
    /// No address.
    pub const UNSET: Self = Self { ip: V6::from_raw([0; 4]), port: Be16::new(0), zero: 0 };

    /// The address `ip` with `port`.
    #[inline(always)]
    pub const fn new(ip: V6, port: Be16) -> Self {
        Self { ip, port, zero: 0 }
    }

    /// Whether it stands for "no address": a translation never leads to port 0.
    #[inline(always)]
    pub const fn is_unset(&self) -> bool {
        self.port.raw() == 0
    }
}

/// One translation: what the program asked for, and where it was led.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Translation {
    /// The address of the Service.
    pub service: Address,
    /// The address of the backend.
    pub backend: Address,
}

/// What a connected socket (TCP or UDP) remembers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Connected {
    /// The translation of its connect; unset after a connect that was not translated.
    pub translation: Translation,
    /// For what later versions keep.
    pub reserved: [u32; 6],
}

/// Where what a connected socket remembers is kept first: found by the socket's cookie, modulo the number of slots.
///
/// A socket whose slot another one has makes storage of its own ([`Connected`]), so that nothing is ever evicted.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Slot {
    /// 1 while a socket has the slot; more for a moment, while others find that out; 0 when it is free.
    pub claims: u64,
    /// The cookie of the socket that has it, or had it last.
    pub cookie: u64,
    /// What that socket remembers; unset after a connect that was not translated.
    pub translation: Translation,
    /// For what later versions keep.
    pub reserved: u64,
}

/// How many Service addresses an unconnected UDP socket remembers in its own storage; for more see [`crate::peers`].
pub const DATAGRAM_SLOTS: usize = 4;

/// What an unconnected UDP socket remembers of the addresses it sent to.
///
/// The hooks that read and write it run under the socket's lock, so that two threads on one socket take turns.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Datagrams {
    /// Its translations; a new one takes a slot that is free.
    pub slots: [Translation; DATAGRAM_SLOTS],
    /// When each slot was last used, by `clock`; 0 for never.
    pub used: [u32; DATAGRAM_SLOTS],
    /// Counts the datagrams to Services.
    pub clock: u32,
    /// How many Service addresses it remembers beyond the slots.
    pub more: u32,
    /// For what later versions keep.
    pub reserved: [u32; 2],
}

impl Datagrams {
    /// Where this socket was led when it last sent to `service`.
    #[inline(always)]
    pub fn backend_of(&self, service: &Address) -> Option<Address> {
        for slot in &self.slots {
            if !slot.backend.is_unset() && slot.service == *service {
                return Some(slot.backend);
            }
        }
        None
    }

    /// Which address this socket meant when something from `backend` answers, and when it used that: of several, the one
    /// it used last; unset if none.
    #[inline(always)]
    pub fn service_of(&self, backend: &Address) -> (Address, u32) {
        let mut last = 0;
        let mut found = Address::UNSET;
        for (slot, used) in self.slots.iter().zip(&self.used) {
            if !slot.backend.is_unset() && slot.backend == *backend && *used >= last {
                last = *used;
                found = slot.service;
            }
        }
        (found, last)
    }

    /// One datagram more. The count starts anew after 2^32 of them; at worst one address of several is then mistaken for
    /// the one that was used last.
    #[inline(always)]
    pub fn tick(&mut self) {
        self.clock = self.clock.wrapping_add(1);
    }

    /// Remembers `translation` in the slot of the same Service address, or in a free one; false if there is none.
    #[inline(always)]
    pub fn remember(&mut self, translation: Translation) -> bool {
        self.tick();
        let mut at = DATAGRAM_SLOTS;
        for index in 0..DATAGRAM_SLOTS {
            if self.slots[index].backend.is_unset() {
                at = index;
            } else if self.slots[index].service == translation.service {
                at = index;
                break;
            }
        }
        if at >= DATAGRAM_SLOTS {
            return false;
        }
        self.slots[at] = translation;
        self.used[at] = self.clock;
        true
    }

    /// Remembers `translation` in the place of the one that was used least recently.
    #[inline(always)]
    pub fn replace(&mut self, translation: Translation) {
        let mut at = 0;
        for index in 1..DATAGRAM_SLOTS {
            if self.used[index] < self.used[at % DATAGRAM_SLOTS] {
                at = index;
            }
        }
        self.slots[at % DATAGRAM_SLOTS] = translation;
        self.used[at % DATAGRAM_SLOTS] = self.clock;
    }

    /// Forgets every translation to `backend`: the socket talks to it directly now.
    #[inline(always)]
    pub fn forget(&mut self, backend: &Address) {
        for slot in &mut self.slots {
            if slot.backend == *backend {
                *slot = Translation::default();
            }
        }
    }
}

const _: () = assert!(size_of::<Address>() == 20);
const _: () = assert!(size_of::<Translation>() == 40);
const _: () = assert!(size_of::<Connected>() == 64);
const _: () = assert!(size_of::<Slot>() == 64);
const _: () = assert!(size_of::<Datagrams>() == 192);

#[cfg(test)]
mod tests {
    use super::*;

    fn address(n: u32) -> Address {
        Address::new(V6::from_raw([1, 2, 3, n]), Be16::new(53))
    }

    fn translation(service: u32, backend: u32) -> Translation {
        Translation { service: address(service), backend: address(backend) }
    }

    #[test]
    fn a_socket_remembers_each_of_its_addresses() {
        let mut datagrams = Datagrams::default();
        for n in 1..=4 {
            assert!(datagrams.remember(translation(n, 100 + n)));
        }
        assert!(!datagrams.remember(translation(5, 105)), "there is no slot for a fifth");
        for n in 1..=4 {
            assert_eq!(datagrams.backend_of(&address(n)), Some(address(100 + n)));
            assert_eq!(datagrams.service_of(&address(100 + n)).0, address(n));
        }
    }

    #[test]
    fn what_takes_a_place_takes_the_one_used_least_recently() {
        let mut datagrams = Datagrams::default();
        for n in [1, 2, 3, 4, 1] {
            assert!(datagrams.remember(translation(n, 100 + n)));
        }
        datagrams.replace(translation(5, 105));
        assert_eq!(datagrams.backend_of(&address(2)), None);
        for n in [1, 3, 4, 5] {
            assert_eq!(datagrams.backend_of(&address(n)), Some(address(100 + n)));
        }
    }

    #[test]
    fn one_backend_behind_two_addresses_answers_for_the_one_used_last() {
        let mut datagrams = Datagrams::default();
        for service in [1, 2, 1, 1, 2] {
            assert!(datagrams.remember(translation(service, 100)));
            assert_eq!(datagrams.service_of(&address(100)).0, address(service));
        }
    }

    #[test]
    fn a_new_backend_replaces_the_old_one_of_the_same_address() {
        let mut datagrams = Datagrams::default();
        assert!(datagrams.remember(translation(1, 100)));
        assert!(datagrams.remember(translation(1, 101)));
        assert!(datagrams.service_of(&address(100)).0.is_unset());
        assert_eq!(datagrams.backend_of(&address(1)), Some(address(101)));
    }

    #[test]
    fn a_backend_that_is_talked_to_directly_is_forgotten() {
        let mut datagrams = Datagrams::default();
        assert!(datagrams.remember(translation(1, 100)));
        assert!(datagrams.remember(translation(2, 101)));
        datagrams.forget(&address(100));
        assert!(datagrams.service_of(&address(100)).0.is_unset());
        assert_eq!(datagrams.service_of(&address(101)).0, address(2));
    }

    #[test]
    fn an_empty_memory_knows_nothing() {
        assert!(Datagrams::default().service_of(&Address::default()).0.is_unset());
        assert_eq!(Datagrams::default().backend_of(&Address::default()), None);
    }
}
