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

/// How many Service addresses an unconnected UDP socket can remember at a time.
pub const DATAGRAM_SLOTS: usize = 4;

/// What an unconnected UDP socket remembers of the addresses it sent to.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Datagrams {
    /// Its translations; a new one takes an unset slot, or else the place of the oldest.
    pub slots: [Translation; DATAGRAM_SLOTS],
    /// How many translations were ever written: the next goes to this number modulo [`DATAGRAM_SLOTS`].
    pub written: u32,
    /// For what later versions keep.
    pub reserved: [u32; 7],
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

    /// Which address this socket meant when something from `backend` answers: of several, the one written last.
    #[inline(always)]
    pub fn service_of(&self, backend: &Address) -> Option<Address> {
        let mut found = None;
        for age in 0..DATAGRAM_SLOTS as u32 {
            // From the oldest to the newest, so that the newest stays.
            let slot = &self.slots[(self.written.wrapping_add(age)) as usize % DATAGRAM_SLOTS];
            if !slot.backend.is_unset() && slot.backend == *backend {
                found = Some(slot.service);
            }
        }
        found
    }

    /// Remembers `translation`, in the place of what this socket remembered of the same Service address.
    #[inline(always)]
    pub fn remember(&mut self, translation: Translation) {
        for slot in &mut self.slots {
            if slot.service == translation.service {
                slot.backend = translation.backend;
                return;
            }
        }
        self.slots[self.written as usize % DATAGRAM_SLOTS] = translation;
        self.written = self.written.wrapping_add(1);
    }
}

const _: () = assert!(size_of::<Address>() == 20);
const _: () = assert!(size_of::<Translation>() == 40);
const _: () = assert!(size_of::<Connected>() == 64);
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
            datagrams.remember(translation(n, 100 + n));
        }
        for n in 1..=4 {
            assert_eq!(datagrams.backend_of(&address(n)), Some(address(100 + n)));
            assert_eq!(datagrams.service_of(&address(100 + n)), Some(address(n)));
        }
    }

    #[test]
    fn a_fifth_address_takes_the_place_of_the_oldest() {
        let mut datagrams = Datagrams::default();
        for n in 1..=5 {
            datagrams.remember(translation(n, 100 + n));
        }
        assert_eq!(datagrams.backend_of(&address(1)), None);
        assert_eq!(datagrams.backend_of(&address(5)), Some(address(105)));
        assert_eq!(datagrams.backend_of(&address(2)), Some(address(102)));
    }

    #[test]
    fn one_backend_behind_two_addresses_answers_for_the_newest() {
        let mut datagrams = Datagrams::default();
        datagrams.remember(translation(1, 100));
        datagrams.remember(translation(2, 100));
        assert_eq!(datagrams.service_of(&address(100)), Some(address(2)));
    }

    #[test]
    fn a_new_backend_replaces_the_old_one_of_the_same_address() {
        let mut datagrams = Datagrams::default();
        datagrams.remember(translation(1, 100));
        datagrams.remember(translation(1, 101));
        assert_eq!(datagrams.service_of(&address(100)), None);
        assert_eq!(datagrams.backend_of(&address(1)), Some(address(101)));
        assert_eq!(datagrams.written, 1);
    }

    #[test]
    fn an_empty_memory_knows_nothing() {
        assert_eq!(Datagrams::default().service_of(&Address::default()), None);
        assert_eq!(Datagrams::default().backend_of(&Address::default()), None);
    }
}
