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

/// How many translations an unconnected UDP socket remembers in its own storage; for more see [`crate::peers`].
pub const DATAGRAM_SLOTS: usize = 4;

/// What an unconnected UDP socket remembers of the addresses it sent to.
///
/// The hooks that read and write it run under the socket's lock, so that two threads on one socket take turns.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct Datagrams {
    /// Its translations: of each Service address one that is in force, and perhaps the one before, whose backend may still
    /// answer.
    pub slots: [Translation; DATAGRAM_SLOTS],
    /// When each slot was last used, by `clock`; 0 for never.
    pub used: [u32; DATAGRAM_SLOTS],
    /// Counts the datagrams to Services.
    pub clock: u32,
    /// How many Service addresses it remembers beyond the slots.
    pub more: u32,
    /// Whose translation is not in force any more, a bit for each slot.
    pub former: u32,
    /// For what later versions keep.
    pub reserved: u32,
}

impl Datagrams {
    /// Where this socket was led when it last sent to `service`.
    #[inline(always)]
    pub fn backend_of(&self, service: &Address) -> Option<Address> {
        for (index, slot) in self.slots.iter().enumerate() {
            if !slot.backend.is_unset() && slot.service == *service && !self.is_former(index) {
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

    /// Remembers that `translation`, which is in force, is used again; false if it is not in force.
    #[inline(always)]
    pub fn renew(&mut self, translation: &Translation) -> bool {
        for index in 0..DATAGRAM_SLOTS {
            if self.slots[index] == *translation && !self.is_former(index) {
                self.used[index] = self.clock;
                return true;
            }
        }
        false
    }

    /// Remembers `translation`, which is not in force yet, in the slot of the former one of the same Service address, or
    /// in a free one. The one that was in force is the former one then. False if there is no such slot.
    #[inline(always)]
    pub fn remember(&mut self, translation: Translation) -> bool {
        let mut at = DATAGRAM_SLOTS;
        for index in 0..DATAGRAM_SLOTS {
            let slot = &self.slots[index];
            if slot.backend.is_unset() {
                at = index;
            } else if slot.service == translation.service && self.is_former(index) {
                at = index;
                break;
            }
        }
        if at >= DATAGRAM_SLOTS {
            return false;
        }
        self.retire(&translation.service);
        self.put(at, translation);
        true
    }

    /// Remembers `translation` at the expense of former ones: in the slot of the same Service address, or in that of the
    /// oldest former one, or in a free one. False if there is none of these.
    #[inline(always)]
    pub fn displace(&mut self, translation: Translation) -> bool {
        let mut at = DATAGRAM_SLOTS;
        let mut oldest = 0;
        for index in 0..DATAGRAM_SLOTS {
            let (slot, age) = (&self.slots[index], self.age(index));
            if slot.service == translation.service {
                at = index;
                break;
            } else if (self.is_former(index) || slot.backend.is_unset()) && age >= oldest {
                oldest = age;
                at = index;
            }
        }
        if at >= DATAGRAM_SLOTS {
            return false;
        }
        self.put(at, translation);
        true
    }

    /// Remembers `translation` in the place of the one that was used least recently.
    #[inline(always)]
    pub fn replace(&mut self, translation: Translation) {
        let mut at = 0;
        for index in 1..DATAGRAM_SLOTS {
            if self.age(index) > self.age(at % DATAGRAM_SLOTS) {
                at = index;
            }
        }
        self.put(at, translation);
    }

    /// What is in force of `service` is a former translation from now on.
    #[inline(always)]
    pub fn retire(&mut self, service: &Address) {
        for index in 0..DATAGRAM_SLOTS {
            if self.slots[index].service == *service {
                self.former |= 1 << index;
            }
        }
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

    #[inline(always)]
    const fn is_former(&self, index: usize) -> bool {
        self.former & (1 << index) != 0
    }

    #[inline(always)]
    const fn age(&self, index: usize) -> u32 {
        self.clock.wrapping_sub(self.used[index])
    }

    /// Puts a translation in force.
    #[inline(always)]
    fn put(&mut self, at: usize, translation: Translation) {
        let at = at % DATAGRAM_SLOTS;
        self.slots[at] = translation;
        self.used[at] = self.clock;
        self.former &= !(1 << at);
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

    /// A datagram to a Service, which is led there.
    fn send(datagrams: &mut Datagrams, service: u32, backend: u32) -> bool {
        let translation = translation(service, backend);
        datagrams.tick();
        datagrams.renew(&translation) || datagrams.remember(translation)
    }

    #[test]
    fn a_socket_remembers_each_of_its_addresses() {
        let mut datagrams = Datagrams::default();
        for n in 1..=4 {
            assert!(send(&mut datagrams, n, 100 + n));
        }
        assert!(!send(&mut datagrams, 5, 105), "there is no slot for a fifth");
        for n in 1..=4 {
            assert_eq!(datagrams.backend_of(&address(n)), Some(address(100 + n)));
            assert_eq!(datagrams.service_of(&address(100 + n)).0, address(n));
        }
    }

    #[test]
    fn what_takes_a_place_takes_the_one_used_least_recently() {
        let mut datagrams = Datagrams::default();
        for n in [1, 2, 3, 4, 1] {
            assert!(send(&mut datagrams, n, 100 + n));
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
            assert!(send(&mut datagrams, service, 100));
            assert_eq!(datagrams.service_of(&address(100)).0, address(service));
        }
    }

    #[test]
    fn a_socket_remembers_the_backend_before_of_the_same_address() {
        let mut datagrams = Datagrams::default();
        for backend in 100..110 {
            assert!(send(&mut datagrams, 1, backend));
            assert!(send(&mut datagrams, 2, backend + 100));
            for (service, backend) in [(1, backend), (2, backend + 100)] {
                assert_eq!(datagrams.backend_of(&address(service)), Some(address(backend)));
                assert_eq!(datagrams.service_of(&address(backend)).0, address(service));
                if backend % 100 > 0 {
                    assert_eq!(datagrams.service_of(&address(backend - 1)).0, address(service));
                }
            }
        }
        assert!(datagrams.service_of(&address(107)).0.is_unset());
    }

    #[test]
    fn a_backend_that_comes_back_is_in_force_again() {
        let mut datagrams = Datagrams::default();
        for backend in [100, 101, 100, 100, 101] {
            assert!(send(&mut datagrams, 1, backend));
            assert_eq!(datagrams.backend_of(&address(1)), Some(address(backend)));
        }
        assert_eq!(datagrams.slots.iter().filter(|it| !it.backend.is_unset()).count(), 2);
    }

    #[test]
    fn former_translations_make_room_the_oldest_first() {
        let mut datagrams = Datagrams::default();
        for (service, backend) in [(1, 100), (2, 200), (2, 201), (1, 101)] {
            assert!(send(&mut datagrams, service, backend));
        }
        assert!(!send(&mut datagrams, 3, 300), "they only go where there is no other room");
        assert!(datagrams.displace(translation(3, 300)));
        assert!(datagrams.service_of(&address(100)).0.is_unset());
        assert_eq!(datagrams.service_of(&address(200)).0, address(2));
        assert!(datagrams.displace(translation(4, 400)));
        assert!(!datagrams.displace(translation(5, 500)), "all are in force");
        assert!(datagrams.displace(translation(1, 102)), "but it may take its own place");
        for (service, backend) in [(1, 102), (2, 201), (3, 300), (4, 400)] {
            assert_eq!(datagrams.backend_of(&address(service)), Some(address(backend)));
        }
    }

    #[test]
    fn what_a_socket_of_an_older_version_remembers_is_in_force() {
        let slots = [1, 2, 3, 4].map(|n| translation(n, 100 + n));
        let datagrams = Datagrams { slots, used: [1, 2, 3, 4], clock: 4, ..Datagrams::default() };
        for n in 1..=4 {
            assert_eq!(datagrams.backend_of(&address(n)), Some(address(100 + n)));
        }
    }

    #[test]
    fn a_backend_that_is_talked_to_directly_is_forgotten() {
        let mut datagrams = Datagrams::default();
        assert!(send(&mut datagrams, 1, 100));
        assert!(send(&mut datagrams, 2, 101));
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
