//! The decision: which backend, if any, for a destination, from the tables of exactly one generation.
//!
//! The one rule: a decision sees one [`Tables`], which stands for one side; nothing here can reach the other.

use crate::{
    net::Be16,
    tables::{BackendKey, Frontend, TCP, UDP},
};

/// The tables of one side, in one address family.
pub trait Tables {
    /// The family's IP address.
    type Ip: Copy;
    /// The family's backend.
    type Backend: Copy + Default + PartialEq;

    /// What stands behind a destination, if it is ours.
    fn frontend(&self, ip: Self::Ip, port: Be16, protocol: u8) -> Option<Frontend>;
    /// The backend in a slot of a set.
    fn backend(&self, key: BackendKey) -> Option<Self::Backend>;
    /// Whether a set contains a backend; asked of UDP frontends only.
    fn is_member(&self, set: u32, backend: Self::Backend) -> bool;
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
/// `random` gives 32 random bits.
#[inline(always)]
pub fn decide<T: Tables>(
    tables: &T,
    ip: T::Ip,
    port: Be16,
    protocol: u8,
    remembered: T::Backend,
    random: impl FnOnce() -> u32,
) -> Verdict<T::Backend> {
    if protocol != TCP && protocol != UDP {
        return Verdict::Pass;
    }
    let Some(frontend) = tables.frontend(ip, port, protocol) else {
        return Verdict::Pass;
    };
    if frontend.count == 0 {
        return Verdict::Refuse;
    }
    if remembered != T::Backend::default() && tables.is_member(frontend.set, remembered) {
        return Verdict::To(remembered);
    }
    let slot = scale(random(), frontend.count);
    // Every slot below the count is there: a whole generation says so. Should it ever not be, failing at once is the
    // answer a client can act on.
    tables.backend(BackendKey { set: frontend.set, slot }).map_or(Verdict::Refuse, Verdict::To)
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
                #[cfg(feature = "next-layout")]
                other_layout: 0,
            })
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

    #[track_caller]
    fn check(protocol: u8, backends: &'static [u32], remembered: u32, random: u32, expect: Verdict<u32>) {
        let tables = One { protocol, backends };
        assert_eq!(decide(&tables, 7, Be16::new(80), protocol, remembered, || random), expect);
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
            assert_eq!(decide(&tables, ip, Be16::new(port), protocol, 0, || 0), Verdict::Pass);
        }
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
