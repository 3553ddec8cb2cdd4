//! The probe addresses: two addresses that no Service has, which show that the programs run.
//!
//! Invariant: nothing sent to them leaves the node, whether a program redirects it or not.
//! A program redirects them to the loopback address, whatever the port; the prober listens there itself. They are compiled
//! in, and compared only when no frontend matched: they are in no table, are not counted, and cost untranslated traffic one
//! comparison.

use crate::net::{V4, V6};

/// An address of the loopback network, which never appears on a wire (RFC 1122, 3.2.1.3); `kpe` in ASCII, so that it is
/// unlikely to be in use.
pub const ADDRESS4: V4 = V4::from_raw(u32::from_ne_bytes([127, 107, 112, 101]));
/// `100::6b:7065`, in the discard-only prefix (RFC 6666). IPv6 has a single loopback address; the prober binds its socket to
/// the loopback interface, so that nothing reaches a router.
pub const ADDRESS6: V6 = V6::from_raw([0x0100_0000_u32.to_be(), 0, 0, 0x006b_7065_u32.to_be()]);

/// Whether an address, IPv4 as v4-mapped, is a probe address.
#[inline(always)]
pub fn is_probe(address: V6) -> bool {
    address == ADDRESS6 || address == ADDRESS4.mapped()
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn the_addresses_never_leave_a_node() {
        assert!(Ipv4Addr::from(ADDRESS4).is_loopback());
        assert_eq!(Ipv4Addr::from(ADDRESS4), Ipv4Addr::new(127, 107, 112, 101));
        assert_eq!(Ipv6Addr::from(ADDRESS6), "100::6b:7065".parse::<Ipv6Addr>().unwrap());
        let others = [V6::LOOPBACK, V4::LOOPBACK.mapped()];
        assert!(is_probe(ADDRESS6) && is_probe(ADDRESS4.mapped()) && !others.into_iter().any(is_probe));
    }
}
