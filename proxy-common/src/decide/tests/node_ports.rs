//! Where a node port is served.

use super::*;

#[test]
fn a_node_port_is_served_at_node_addresses() {
    let tables = OneFrontend::new(TCP, &[10], 0);
    for (is_host, address, port, is_served) in [
        (false, LOCAL, 30_080, true),
        (false, INTERFACE, 30_080, true),
        (false, REMOTE, 30_080, true),
        (false, 9, 30_080, false),
        (false, LOCAL, 30_082, false),
        (false, INTERFACE, 30_082, false),
        (false, REMOTE, 30_082, false),
        // Of local policy: other nodes decide for their addresses.
        (false, LOCAL, 30_081, true),
        (false, REMOTE, 30_081, false),
        // The loopback address is the node's in the host's namespace only.
        (true, LOOPBACK, 30_080, true),
        (false, LOOPBACK, 30_080, false),
    ] {
        let socket = FakeSocket { is_host, ..FakeSocket::default() };
        let expect = if is_served { to(10) } else { Verdict::Pass };
        assert_eq!(verdict(&tables, &socket, address, port, 0), expect, "{is_host} {address}:{port}");
    }
}

#[test]
fn a_bind_conflicts_with_a_node_port_where_it_is_served() {
    let tables = OneFrontend::new(TCP, &[10], 0);
    for (address, port, protocol, expect) in [
        (0, 30_080, TCP, true),
        (LOCAL, 30_080, TCP, true),
        (INTERFACE, 30_080, TCP, true),
        (LOOPBACK, 30_081, TCP, true),
        (REMOTE, 30_080, TCP, false),
        (9, 30_080, TCP, false),
        (0, 30_082, TCP, false),
        (0, 80, TCP, false),
        (0, 30_080, UDP, false),
    ] {
        let found = node_port_conflict(&tables, ip(address), Be16::new(port), protocol).is_some();
        assert_eq!(found, expect, "{address}:{port}, protocol {protocol}");
    }
}
