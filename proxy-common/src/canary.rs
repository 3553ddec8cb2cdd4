//! The canary: two addresses that no Service has, by which the programs show that they act.
//!
//! The one rule: nothing that is sent there leaves the node, whether a program leads it or not.
//! A program leads them to the loopback address, whatever the port; who asks listens there himself. They are compiled in,
//! and looked at only once a destination was found to be nobody's: so they are in no table, count for nothing, and cost one
//! comparison of what is not translated.

use crate::net::{V4, V6};

/// An address of the loopback network, which is never seen on a wire (RFC 1122, 3.2.1.3); `kpe` in ASCII, so that nobody
/// else is there by chance.
pub const ADDRESS4: V4 = V4::from_raw(u32::from_ne_bytes([127, 107, 112, 101]));
/// `100::6b:7065`: an address whose traffic is to be discarded (RFC 6666). IPv6 has only one loopback address; whoever asks
/// binds its socket to the loopback interface, so that nothing gets as far as a router.
pub const ADDRESS6: V6 = V6::from_raw([0x0100_0000_u32.to_be(), 0, 0, 0x006b_7065_u32.to_be()]);

/// Whether an address, a v4 one v4-mapped, is one of the two.
#[inline(always)]
pub fn is(address: V6) -> bool {
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
        assert!(is(ADDRESS6) && is(ADDRESS4.mapped()) && !is(V6::LOOPBACK) && !is(V4::LOOPBACK.mapped()));
    }
}
