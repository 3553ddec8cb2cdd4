//! The decision: which backend, if any, for a destination, from the tables of exactly one generation.
//!
//! The one rule: a decision sees one [`Tables`], which stands for one side; nothing here can reach the other.

use crate::{
    net::Be16,
    tables::{BackendKey, Frontend, LOOPBACK, OTHER, OWN, OWN_ADDRESSES_ONLY, Place, TCP, UDP},
};

/// The tables of one side, in one address family.
pub trait Tables {
    /// The family's IP address.
    type Ip: Copy;
    /// The family's backend.
    type Backend: Copy + Default + PartialEq;

    /// What stands behind a destination, if it is ours.
    fn frontend(&self, ip: Self::Ip, port: Be16, protocol: u8) -> Option<Frontend>;
    /// Whether a port lies between the least and the greatest node port.
    fn may_be_node_port(&self, port: Be16) -> bool;
    /// What stands behind a node port, if it is one.
    fn node_port(&self, port: Be16, protocol: u8) -> Option<Frontend>;
    /// Whose an address is, if it is a node's.
    fn place(&self, ip: Self::Ip) -> Option<Place>;
    /// The backend in a slot of a set.
    fn backend(&self, key: BackendKey) -> Option<Self::Backend>;
    /// Whether a set contains a backend; asked of UDP frontends only.
    fn is_member(&self, set: u32, backend: Self::Backend) -> bool;
}

/// Who connects or sends, as far as the decision asks.
pub trait Caller {
    /// 32 random bits.
    fn random(&self) -> u32;
    /// Whether it is in the node's own network namespace, where the loopback address is the node's.
    fn is_host(&self) -> bool;
}

/// What is to become of a connect or a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict<Backend> {
    /// Not ours: leave it untouched.
    Pass,
    /// Lead it to this backend.
    To(Backend),
    /// Ours, and nobody is there: fail at once.
    Refuse,
}

/// Decides where a new connection or a datagram to `(ip, port, protocol)` goes.
///
/// `remembered` is the backend that this socket used for this destination before: it is kept while it is in the set. The
/// default stands for none; as an `Option` it would be an undefined word in the kernel, which the verifier refuses.
#[inline(always)]
pub fn decide<T: Tables>(
    tables: &T,
    caller: &impl Caller,
    ip: T::Ip,
    port: Be16,
    protocol: u8,
    remembered: T::Backend,
) -> Verdict<T::Backend> {
    if protocol != TCP && protocol != UDP {
        return Verdict::Pass;
    }
    let found = match tables.frontend(ip, port, protocol) {
        Some(frontend) => Some(frontend),
        // Told by the port alone, so that what is no node port costs no second look-up.
        None if tables.may_be_node_port(port) => node_port(tables, caller, ip, port, protocol),
        None => None,
    };
    let Some(frontend) = found else {
        return Verdict::Pass;
    };
    if frontend.count == 0 {
        return Verdict::Refuse;
    }
    if remembered != T::Backend::default() && tables.is_member(frontend.set, remembered) {
        return Verdict::To(remembered);
    }
    let slot = scale(caller.random(), frontend.count);
    // Every slot below the count is there: a whole generation says so. Should it ever not be, failing at once is the
    // answer a client can act on.
    tables.backend(BackendKey { set: frontend.set, slot }).map_or(Verdict::Refuse, Verdict::To)
}

/// What stands behind a node port at this address, for this caller.
#[inline(always)]
fn node_port<T: Tables>(
    tables: &T,
    caller: &impl Caller,
    ip: T::Ip,
    port: Be16,
    protocol: u8,
) -> Option<Frontend> {
    let frontend = tables.node_port(port, protocol)?;
    let is_served = match tables.place(ip)? {
        OWN => true,
        OTHER => frontend.flags & OWN_ADDRESSES_ONLY == 0,
        LOOPBACK => caller.is_host(),
        _ => false,
    };
    is_served.then_some(frontend)
}

/// Brings 32 random bits down to `0..count`, by multiplication (no division in the kernel's hot path).
/// The bias is below `count / 2^32`.
#[inline(always)]
const fn scale(random: u32, count: u32) -> u32 {
    ((random as u64 * count as u64) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A table of one frontend, `7:80`, with these backends.
    struct One {
        protocol: u8,
        backends: &'static [u32],
    }

    impl Tables for One {
        type Ip = u32;
        type Backend = u32;

        fn frontend(&self, ip: u32, port: Be16, protocol: u8) -> Option<Frontend> {
            let count = self.backends.len() as u32;
            (ip == 7 && port == Be16::new(80) && protocol == self.protocol).then_some(Frontend {
                set: 1,
                count,
                flags: 0,
                zero: 0,
                #[cfg(feature = "next-layout")]
                other_layout: 0,
            })
        }

        fn may_be_node_port(&self, port: Be16) -> bool {
            (30_000..=30_100).contains(&port.get())
        }

        fn node_port(&self, port: Be16, protocol: u8) -> Option<Frontend> {
            let mut frontend = self.frontend(7, Be16::new(80), protocol)?;
            assert!(self.may_be_node_port(port), "asked of node ports only");
            frontend.flags = if port.get() == 30_081 { OWN_ADDRESSES_ONLY } else { 0 };
            [30_080, 30_081].contains(&port.get()).then_some(frontend)
        }

        fn place(&self, ip: u32) -> Option<Place> {
            [OWN, OTHER, LOOPBACK].into_iter().find(|it| *it == ip)
        }

        fn backend(&self, key: BackendKey) -> Option<u32> {
            assert_eq!(key.set, 1);
            self.backends.get(key.slot as usize).copied()
        }

        fn is_member(&self, _: u32, backend: u32) -> bool {
            assert_eq!(self.protocol, UDP, "only UDP sockets return to a backend");
            self.backends.contains(&backend)
        }
    }

    struct Someone {
        random: u32,
        is_host: bool,
    }

    const SOMEONE: Someone = Someone { random: 0, is_host: false };

    impl Caller for Someone {
        fn random(&self) -> u32 {
            self.random
        }

        fn is_host(&self) -> bool {
            self.is_host
        }
    }

    #[track_caller]
    fn check(protocol: u8, backends: &'static [u32], remembered: u32, random: u32, expect: Verdict<u32>) {
        let tables = One { protocol, backends };
        let caller = Someone { random, is_host: false };
        assert_eq!(decide(&tables, &caller, 7, Be16::new(80), protocol, remembered), expect);
    }

    #[test]
    fn a_service_without_backends_refuses() {
        check(TCP, &[], 0, 0, Verdict::Refuse);
        check(UDP, &[], 10, 0, Verdict::Refuse);
    }

    #[test]
    fn the_random_bits_choose_the_slot() {
        check(TCP, &[10, 11, 12], 0, 0, Verdict::To(10));
        check(TCP, &[10, 11, 12], 0, u32::MAX / 2, Verdict::To(11));
        check(TCP, &[10, 11, 12], 0, u32::MAX, Verdict::To(12));
    }

    #[test]
    fn a_remembered_backend_is_kept_while_it_is_a_member() {
        check(UDP, &[10, 11, 12], 11, 0, Verdict::To(11));
        check(UDP, &[10, 12], 11, 0, Verdict::To(10));
    }

    #[test]
    fn what_is_not_ours_passes() {
        let tables = One { protocol: TCP, backends: &[10] };
        for (ip, port, protocol) in [(8, 80, TCP), (7, 81, TCP), (7, 80, UDP), (7, 80, 132)] {
            assert_eq!(decide(&tables, &SOMEONE, ip, Be16::new(port), protocol, 0), Verdict::Pass);
        }
    }

    #[track_caller]
    fn check_node_port(is_host: bool, ip: u32, port: u16, expect: Verdict<u32>) {
        let (tables, caller) = (One { protocol: TCP, backends: &[10] }, Someone { random: 0, is_host });
        assert_eq!(decide(&tables, &caller, ip, Be16::new(port), TCP, 0), expect);
    }

    #[test]
    fn a_node_port_is_served_at_the_nodes_addresses() {
        for ip in [OWN, OTHER] {
            check_node_port(false, ip, 30_080, Verdict::To(10));
            check_node_port(false, ip, 30_082, Verdict::Pass);
        }
        check_node_port(false, 9, 30_080, Verdict::Pass);
    }

    #[test]
    fn a_node_port_of_local_policy_is_left_to_other_nodes() {
        check_node_port(false, OWN, 30_081, Verdict::To(10));
        check_node_port(false, OTHER, 30_081, Verdict::Pass);
    }

    #[test]
    fn the_loopback_address_is_the_nodes_only_on_the_node() {
        check_node_port(true, LOOPBACK, 30_080, Verdict::To(10));
        check_node_port(false, LOOPBACK, 30_080, Verdict::Pass);
    }

    proptest! {
        #[test]
        fn scaling_stays_in_range(random: u32, count in 1u32..) {
            prop_assert!(scale(random, count) < count);
        }

        #[test]
        fn scaling_reaches_every_slot(count in 1u32..1000) {
            let step = u32::MAX / count;
            let mut hit: Vec<u32> = (0..count).map(|n| scale(n * step + step / 2, count)).collect();
            hit.dedup();
            prop_assert_eq!(hit.len() as u32, count);
        }
    }
}
