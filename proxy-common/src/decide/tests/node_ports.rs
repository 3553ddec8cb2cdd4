//! Where a node port is served.

use super::*;

#[track_caller]
fn check_node_port(is_host: bool, address: u32, port: u16, expect: Verdict) {
    let (tables, socket) = (OneFrontend::new(TCP, &[10], 0), FakeSocket { is_host, ..FakeSocket::default() });
    assert_eq!(verdict(&tables, &socket, address, port, 0), expect);
}

#[test]
fn a_node_port_is_served_at_node_addresses() {
    for address in [LOCAL, INTERFACE, REMOTE] {
        check_node_port(false, address, 30_080, to(10));
        check_node_port(false, address, 30_082, Verdict::Pass);
    }
    check_node_port(false, 9, 30_080, Verdict::Pass);
}

#[test]
fn a_node_port_of_local_policy_passes_at_the_addresses_of_other_nodes() {
    check_node_port(false, LOCAL, 30_081, to(10));
    check_node_port(false, REMOTE, 30_081, Verdict::Pass);
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

#[test]
fn node_ports_are_served_on_loopback_only_in_the_host_namespace() {
    check_node_port(true, LOOPBACK, 30_080, to(10));
    check_node_port(false, LOOPBACK, 30_080, Verdict::Pass);
}
