//! Ways, hashes and wrappings.

use std::net::{Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;

use super::*;
use crate::tables::{TCP, UDP};

const COUNTERS: ForwardCounters = ForwardCounters { arrived: 8, forwarded: 12 };

/// A frontend with one row, which begins at position 1.
struct Fixed {
    forward: Forward,
    row: Row,
}

impl ForwardTables for Fixed {
    fn forward(&self, it: FrontendKey6) -> Option<Forward> {
        let address = v4("203.0.113.1").mapped();
        let key = FrontendKey6 { address, port: Be16::new(80), protocol: TCP, zero: 0 };
        (it == key).then_some(self.forward)
    }

    fn row(&self, position: u32) -> Option<Row> {
        (position == self.forward.first).then_some(self.row)
    }
}

fn v4(text: &str) -> V4 {
    text.parse::<Ipv4Addr>().expect("an address").into()
}

fn v6(text: &str) -> V6 {
    text.parse::<Ipv6Addr>().expect("an address").into()
}

fn flow(source: V6, source_port: u16, protocol: u8, continues: bool) -> Flow {
    let destination = v4("203.0.113.1").mapped();
    let (source_port, destination_port) = (Be16::new(source_port), Be16::new(80));
    Flow { source, destination, source_port, destination_port, protocol, continues }
}

fn fixed(row: Row, flags: u32) -> Fixed {
    Fixed { forward: Forward { first: 1, mask: 0, flags, counters: COUNTERS }, row }
}

#[test]
fn a_row_says_where_a_packet_goes_and_flags_what_is_known_here_first() {
    let client = v4("198.51.100.7").mapped();
    let here = |second| Way::Here { counters: COUNTERS, second };
    let to = |second| Way::To { counters: COUNTERS, node: 2, second };
    for (row, flags, continues, expect) in [
        (Row::new(THIS_NODE, NO_NODE), 0, true, here(NO_NODE)),
        (Row::new(THIS_NODE, 3), 0, true, here(3)),
        // A connection that begins belongs to the owner.
        (Row::new(THIS_NODE, 3), 0, false, here(NO_NODE)),
        (Row::new(2, THIS_NODE), 0, true, to(THIS_NODE)),
        (Row::new(2, 3), 0, false, to(NO_NODE)),
        (Row::new(NO_NODE, 3), 0, true, Way::Pass),
        // One that may be known here is looked for before it goes to the owner.
        (Row::new(2, 3), KNOWN_FIRST, true, here(2 | OWNER)),
        (Row::new(2, 3), KNOWN_FIRST, false, here(2 | OWNER)),
        (Row::new(THIS_NODE, 3), KNOWN_FIRST, true, here(3)),
        (Row::new(NO_NODE, 3), KNOWN_FIRST, true, Way::Pass),
        (Row::new(2, 3), KNOWN_FIRST | ESTABLISHED_ONLY, true, here(2 | OWNER)),
        (Row::new(2, 3), KNOWN_FIRST | ESTABLISHED_ONLY, false, Way::Pass),
        (Row::new(THIS_NODE, 3), KNOWN_FIRST | ESTABLISHED_ONLY, false, Way::Pass),
    ] {
        let tables = fixed(row, flags);
        assert_eq!(way(&tables, &flow(client, 40_000, TCP, continues)), expect, "{row:?} {flags:#b}");
        assert_eq!(way(&tables, &flow(client, 40_000, UDP, false)), Way::Pass, "no such frontend");
    }
    let flow = flow(client, 40_000, TCP, true);
    for (row, expect) in [(Row::new(2, 3), 3), (Row::new(2, THIS_NODE), NO_NODE), (Row::new(4, 3), NO_NODE)] {
        let tables = fixed(row, KNOWN_FIRST);
        assert_eq!(second_after(&tables, &tables.forward, &flow, 2), expect, "{row:?}");
    }
}

#[test]
fn a_priority_names_the_second() {
    for (second, is_owner) in [(3, true), (3, false), (MAX_NODE, true)] {
        let marked = if is_owner { second | OWNER } else { second };
        assert_eq!(second_of(priority(marked)), (second, is_owner));
        assert_eq!(priority(marked) & FORWARDED_MASK, FORWARDED);
    }
    for none in [NO_NODE, NO_NODE | OWNER] {
        assert_eq!(priority(none), FORWARDED | u32::from(NO_SECOND));
    }
}

#[test]
fn flows_are_spread_evenly_and_those_of_a_client_stay_together_on_request() {
    const ROWS: u32 = 64;
    let mut hits = [[0_u32; ROWS as usize]; 2];
    for client in 0..64_u8 {
        for port in 0..256_u16 {
            let mut address = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0).octets();
            address[15] = client;
            let flow = flow(Ipv6Addr::from(address).into(), 40_000 + port, TCP, true);
            hits[0][(flow.hash(false) % ROWS) as usize] += 1;
            hits[1][(flow.hash(true) % ROWS) as usize] += 1;
        }
    }
    // 256 each; six standard deviations.
    assert!(hits[0].iter().all(|it| it.abs_diff(256) < 96), "{:?}", hits[0]);
    assert!(hits[1].iter().all(|it| it.is_multiple_of(256)), "{:?}", hits[1]);
}

#[test]
fn a_wrapping_is_what_captures_and_routers_read() {
    let wrap = Wrap {
        source: v4("192.0.2.1"),
        destination: v4("192.0.2.2"),
        second: v4("192.0.2.3"),
        length: 1_000,
        hash: 0x1234_5678,
        port: Be16::new(DEFAULT_PORT),
    };
    let wrapping = V4::wrap(wrap);
    let bytes = bytemuck::bytes_of(&wrapping);
    // The sum of a header with its checksum is all ones (RFC 1071).
    let sum: u32 = bytes[..20].chunks(2).map(|it| u32::from(it[0]) << 8 | u32::from(it[1])).sum();
    assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
    assert_eq!(bytes[2..4], 1_044_u16.to_be_bytes());
    let udp = [&[0xd2, 0x34][..], &DEFAULT_PORT.to_be_bytes(), &1_024_u16.to_be_bytes(), &[0, 0]].concat();
    assert_eq!(bytes[20..28], udp);
    assert_eq!(bytes[28..40], [2, 0x40, 8, 0, 0, 0, 0, 0, 0xff, 0x4b, 0x81, 1]);
    assert_eq!(bytes[40..], [192, 0, 2, 3]);
    let (source, destination, second) = (v6("2001:db8::1"), v6("2001:db8::2"), V6::default());
    let wrapping = V6::wrap(Wrap { source, destination, second, length: 1_000, hash: 0, port: wrap.port });
    let bytes = bytemuck::bytes_of(&wrapping);
    assert_eq!(bytes[..8], [0x60, 0, 0, 0, 4, 0x0c, UDP, 64]);
    assert_eq!(bytes[48..60], [5, 0x40, 0x86, 0xdd, 0, 0, 0, 0, 0xff, 0x4b, 0x81, 4]);
}

proptest! {
    #[test]
    fn what_was_wrapped_is_unwrapped(addresses: [u32; 3], length in 20_u32..70_000, hash: u32, port: u16) {
        let [source, destination, second] = addresses.map(V4::from_raw);
        let wrap = Wrap { source, destination, second, length, hash, port: Be16::new(port) };
        prop_assert_eq!(V4::unwrap(&V4::wrap(wrap)), Some((source, second)));
        let [source, destination, second] = addresses.map(|it| V6::from_raw([it, 1, 2, it]));
        let wrap = Wrap { source, destination, second, length, hash, port: Be16::new(port) };
        prop_assert_eq!(V6::unwrap(&V6::wrap(wrap)), Some((source, second)));
    }

    #[test]
    fn nothing_else_is_unwrapped(bytes: [u8; 16], at in 28_usize..40) {
        let addresses = [1_u32, 2, 3].map(V4::from_raw);
        let [source, destination, second] = addresses;
        let mut wrapping = V4::wrap(Wrap { source, destination, second, length: 9, hash: 9, port: Be16::new(9) });
        let original = bytemuck::bytes_of(&wrapping)[at];
        bytemuck::bytes_of_mut(&mut wrapping)[at] = bytes[0];
        prop_assert_eq!(V4::unwrap(&wrapping).is_some(), bytes[0] == original);
    }
}
