//! The translations of an unconnected UDP socket, kept in its own storage and freed with it; for more of them see
//! [`crate::udp_nat`].
//!
//! The layout outlasts upgrades (see [`crate::SOCK_NAT_VERSION`]): it grows only into `reserved`, which stays zero until
//! then.

#[cfg(feature = "user")]
use bytemuck::{Pod, Zeroable};

use crate::{net::SockAddr, sock_nat::SockNat};

/// How many translations an unconnected UDP socket keeps in its own storage.
pub const UDP_NAT_CACHE_SLOTS: usize = 4;

/// The socket storage of an unconnected UDP socket.
///
/// The hooks that access it run under the socket's lock, so that two threads on one socket take turns.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(Pod, Zeroable))]
pub struct UdpNatCache {
    /// Its translations: of each Service address the current one, and perhaps the previous one, whose backend may still
    /// reply.
    pub slots: [SockNat; UDP_NAT_CACHE_SLOTS],
    /// When each slot was last used, by `clock`; 0 for never.
    pub used: [u32; UDP_NAT_CACHE_SLOTS],
    /// Counts the datagrams to Services.
    pub clock: u32,
    /// How many Service addresses the shared table holds for this socket.
    pub overflow_count: u32,
    /// Which slots hold previous translations, one bit each.
    pub previous: u32,
    /// For later versions.
    pub reserved: u32,
}

impl UdpNatCache {
    /// The current backend of `service`.
    #[inline(always)]
    pub fn backend_of(&self, service: &SockAddr) -> Option<SockAddr> {
        for (index, slot) in self.slots.iter().enumerate() {
            if !slot.backend.is_unset() && slot.service == *service && !self.is_previous(index) {
                return Some(slot.backend);
            }
        }
        None
    }

    /// The Service address that a reply from `backend` belongs to, and when it was used: of several, the one used last;
    /// unset if none.
    #[inline(always)]
    pub fn service_of(&self, backend: &SockAddr) -> (SockAddr, u32) {
        let mut last = 0;
        let mut found = SockAddr::UNSET;
        for (slot, used) in self.slots.iter().zip(&self.used) {
            if !slot.backend.is_unset() && slot.backend == *backend && *used >= last {
                last = *used;
                found = slot.service;
            }
        }
        (found, last)
    }

    /// Counts a datagram. The count wraps after 2^32 of them; at worst one address of several is then mistaken for the one
    /// used last.
    #[inline(always)]
    pub fn tick(&mut self) {
        self.clock = self.clock.wrapping_add(1);
    }

    /// Marks `nat` as used now; false if it is not current.
    #[inline(always)]
    pub fn touch(&mut self, nat: &SockNat) -> bool {
        for index in 0..UDP_NAT_CACHE_SLOTS {
            if self.slots[index] == *nat && !self.is_previous(index) {
                self.used[index] = self.clock;
                return true;
            }
        }
        false
    }

    /// Stores `nat`, which is not current yet, in the slot of the previous translation of the same Service address, or in a
    /// free one, and demotes the current one. False if there is no such slot.
    #[inline(always)]
    pub fn insert(&mut self, nat: SockNat) -> bool {
        let mut at = UDP_NAT_CACHE_SLOTS;
        for index in 0..UDP_NAT_CACHE_SLOTS {
            let slot = &self.slots[index];
            if slot.backend.is_unset() {
                at = index;
            } else if slot.service == nat.service && self.is_previous(index) {
                at = index;
                break;
            }
        }
        if at >= UDP_NAT_CACHE_SLOTS {
            return false;
        }
        self.demote(&nat.service);
        self.put(at, nat);
        true
    }

    /// Stores `nat` and evicts a previous translation if it must: in the slot of the same Service address, or in that of the
    /// oldest previous translation, or in a free one. False if there is none of these.
    #[inline(always)]
    pub fn evict(&mut self, nat: SockNat) -> bool {
        let mut at = UDP_NAT_CACHE_SLOTS;
        let mut oldest = 0;
        for index in 0..UDP_NAT_CACHE_SLOTS {
            let (slot, age) = (&self.slots[index], self.age(index));
            if slot.service == nat.service {
                at = index;
                break;
            } else if (self.is_previous(index) || slot.backend.is_unset()) && age >= oldest {
                oldest = age;
                at = index;
            }
        }
        if at >= UDP_NAT_CACHE_SLOTS {
            return false;
        }
        self.put(at, nat);
        true
    }

    /// Stores `nat` in the slot used least recently.
    #[inline(always)]
    pub fn replace(&mut self, nat: SockNat) {
        let mut at = 0;
        for index in 1..UDP_NAT_CACHE_SLOTS {
            if self.age(index) > self.age(at % UDP_NAT_CACHE_SLOTS) {
                at = index;
            }
        }
        self.put(at, nat);
    }

    /// Makes the current translation of `service` the previous one.
    #[inline(always)]
    pub fn demote(&mut self, service: &SockAddr) {
        for index in 0..UDP_NAT_CACHE_SLOTS {
            if self.slots[index].service == *service {
                self.previous |= 1 << index;
            }
        }
    }

    /// Removes every translation to `backend`: the socket talks to it directly now.
    #[inline(always)]
    pub fn remove(&mut self, backend: &SockAddr) {
        for slot in &mut self.slots {
            if slot.backend == *backend {
                *slot = SockNat::default();
            }
        }
    }

    #[inline(always)]
    const fn is_previous(&self, index: usize) -> bool {
        self.previous & (1 << index) != 0
    }

    #[inline(always)]
    const fn age(&self, index: usize) -> u32 {
        self.clock.wrapping_sub(self.used[index])
    }

    /// Stores a current translation.
    #[inline(always)]
    fn put(&mut self, at: usize, nat: SockNat) {
        let at = at % UDP_NAT_CACHE_SLOTS;
        self.slots[at] = nat;
        self.used[at] = self.clock;
        self.previous &= !(1 << at);
    }
}

const _: () = assert!(size_of::<UdpNatCache>() == 192);

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::net::{Be16, V6};

    pub(crate) fn address(n: u32) -> SockAddr {
        SockAddr::new(V6::from_raw([1, 2, 3, n]), Be16::new(53))
    }

    pub(crate) fn nat(service: u32, backend: u32) -> SockNat {
        SockNat { service: address(service), backend: address(backend) }
    }

    /// A datagram to a Service, which is redirected to this backend.
    fn send(cache: &mut UdpNatCache, service: u32, backend: u32) -> bool {
        let nat = nat(service, backend);
        cache.tick();
        cache.touch(&nat) || cache.insert(nat)
    }

    #[test]
    fn each_address_of_a_socket_has_a_slot() {
        let mut cache = UdpNatCache::default();
        for n in 1..=4 {
            assert!(send(&mut cache, n, 100 + n));
        }
        assert!(!send(&mut cache, 5, 105), "there is no slot for a fifth");
        for n in 1..=4 {
            assert_eq!(cache.backend_of(&address(n)), Some(address(100 + n)));
            assert_eq!(cache.service_of(&address(100 + n)).0, address(n));
        }
    }

    #[test]
    fn the_slot_used_least_recently_is_replaced() {
        let mut cache = UdpNatCache::default();
        for n in [1, 2, 3, 4, 1] {
            assert!(send(&mut cache, n, 100 + n));
        }
        cache.replace(nat(5, 105));
        assert_eq!(cache.backend_of(&address(2)), None);
        for n in [1, 3, 4, 5] {
            assert_eq!(cache.backend_of(&address(n)), Some(address(100 + n)));
        }
    }

    #[test]
    fn one_backend_behind_two_addresses_replies_for_the_one_used_last() {
        let mut cache = UdpNatCache::default();
        for service in [1, 2, 1, 1, 2] {
            assert!(send(&mut cache, service, 100));
            assert_eq!(cache.service_of(&address(100)).0, address(service));
        }
    }

    #[test]
    fn the_previous_backend_of_each_address_is_kept() {
        let mut cache = UdpNatCache::default();
        for backend in 100..110 {
            assert!(send(&mut cache, 1, backend));
            assert!(send(&mut cache, 2, backend + 100));
            for (service, backend) in [(1, backend), (2, backend + 100)] {
                assert_eq!(cache.backend_of(&address(service)), Some(address(backend)));
                assert_eq!(cache.service_of(&address(backend)).0, address(service));
                if backend % 100 > 0 {
                    assert_eq!(cache.service_of(&address(backend - 1)).0, address(service));
                }
            }
        }
        assert!(cache.service_of(&address(107)).0.is_unset());
    }

    #[test]
    fn a_backend_that_returns_is_current_again() {
        let mut cache = UdpNatCache::default();
        for backend in [100, 101, 100, 100, 101] {
            assert!(send(&mut cache, 1, backend));
            assert_eq!(cache.backend_of(&address(1)), Some(address(backend)));
        }
        assert_eq!(cache.slots.iter().filter(|it| !it.backend.is_unset()).count(), 2);
    }

    #[test]
    fn previous_translations_are_evicted_the_oldest_first() {
        let mut cache = UdpNatCache::default();
        for (service, backend) in [(1, 100), (2, 200), (2, 201), (1, 101)] {
            assert!(send(&mut cache, service, backend));
        }
        assert!(!send(&mut cache, 3, 300), "nothing is evicted unless there is no other room");
        assert!(cache.evict(nat(3, 300)));
        assert!(cache.service_of(&address(100)).0.is_unset());
        assert_eq!(cache.service_of(&address(200)).0, address(2));
        assert!(cache.evict(nat(4, 400)));
        assert!(!cache.evict(nat(5, 500)), "all are current");
        assert!(cache.evict(nat(1, 102)), "but it may take its own slot");
        for (service, backend) in [(1, 102), (2, 201), (3, 300), (4, 400)] {
            assert_eq!(cache.backend_of(&address(service)), Some(address(backend)));
        }
    }

    #[test]
    fn translations_of_an_older_version_are_current() {
        let slots = [1, 2, 3, 4].map(|n| nat(n, 100 + n));
        let cache = UdpNatCache { slots, used: [1, 2, 3, 4], clock: 4, ..UdpNatCache::default() };
        for n in 1..=4 {
            assert_eq!(cache.backend_of(&address(n)), Some(address(100 + n)));
        }
    }

    #[test]
    fn a_backend_that_is_talked_to_directly_is_removed() {
        let mut cache = UdpNatCache::default();
        assert!(send(&mut cache, 1, 100));
        assert!(send(&mut cache, 2, 101));
        cache.remove(&address(100));
        assert!(cache.service_of(&address(100)).0.is_unset());
        assert_eq!(cache.service_of(&address(101)).0, address(2));
    }

    #[test]
    fn an_empty_cache_finds_nothing() {
        assert!(UdpNatCache::default().service_of(&SockAddr::default()).0.is_unset());
        assert_eq!(UdpNatCache::default().backend_of(&SockAddr::default()), None);
    }
}
