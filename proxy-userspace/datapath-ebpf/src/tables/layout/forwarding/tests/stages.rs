//! Forwarding that begins, ends and follows the packet path.

use std::num::NonZeroU32;

use model::state::ClientIpAffinity;

use super::*;

#[test]
fn rows_follow_the_packet_path() {
    let mut it = Written::beside_packets();
    it.update(web(&[(0, 1), (1, 1)]));
    assert_eq!(it.flags(1), None, "packets of other nodes would not be served as whole ones");
    assert!(it.packets_have(&web(&[(0, 1), (1, 1)])));
    assert_eq!(it.owners(1), [Some(0), Some(1)].into());
    let now = web(&[(1, 1), (2, 1)]);
    it.update(now.clone());
    assert_eq!(it.owners(1), [Some(0), Some(1)].into());
    assert!(it.packets_have(&now));
    assert_eq!(it.owners(1), [Some(1), Some(2)].into());
    assert!(!it.packets_have(&now), "nothing has changed");
}

#[test]
fn connections_known_here_come_first_until_none_is_left() {
    let mut it = Written::beside_packets();
    it.both(&web(&[]));
    it.both(&web(&[(0, 1), (1, 1)]));
    assert_eq!(it.flags(1), Some(KNOWN_FIRST));
    let frontend: SocketAddr = "203.0.113.1:80".parse().unwrap();
    assert_eq!(it.layout.forwarding.take_begun().unwrap(), [frontend].into());
    assert_eq!(it.layout.forwarding.take_begun(), None);
    assert!(!it.layout.forwarding.set_settled(&HashSet::new()));
    assert!(it.layout.forwarding.set_settled(&[frontend].into()));
    it.update(it.layout.state.clone());
    assert_eq!((it.flags(1), it.layout.forwarding.take_begun().unwrap()), (Some(0), [].into()));
    it.both(&web(&[(0, 1), (1, 1), (2, 1)]));
    assert_eq!(it.flags(1), Some(0), "it does not begin again");
}

#[test]
fn connections_outlast_their_ports_forwarding_but_not_its_frontend() {
    let mut it = Written::beside_packets();
    it.both(&web(&[(0, 1), (1, 1)]));
    let rows = it.rows(1);
    it.both(&web(&[]));
    assert_eq!((it.flags(1), it.rows(1)), (Some(ENDED), rows));
    assert_eq!(it.layout.forwarding.nodes.take_peers().unwrap().1, [].into(), "nobody is probed");
    it.both(&web(&[(0, 1), (1, 1), (2, 1)]));
    assert_eq!(it.flags(1), Some(KNOWN_FIRST), "new ones were translated meanwhile");
    assert!(it.rows(1).iter().any(|it| it[1].is_some()), "what moves has a second");
    it.both(&web(&[]));
    it.both(&state([service("web", 2, &[])]));
    assert_eq!(it.forward(1), None);
    assert!(it.tables[&Table::Forwards].is_empty() && it.layout.forwarding.entries(Table::ForwardRows) == 0);
}

#[test]
fn connections_outlast_processes_and_the_end_of_forwarding() {
    let mut before = Written::beside_packets();
    before.both(&state([service("web", 1, &[(0, 1), (1, 1)]), service("other", 2, &[(0, 1), (1, 1)])]));
    for forwarded in [&[][..], &[(0, 1), (1, 1)]] {
        let mut it = Written::beside_packets();
        it.layout.forwarding.restore(before.previous(&[1, 2]));
        assert_eq!(it.layout.forwarding.previous_families(), [Family::V4]);
        let state = state([service("web", 1, forwarded), service("other", 2, &[])]);
        it.update(state.clone());
        // The packet path has no state yet.
        let expect = if forwarded.is_empty() { ENDED } else { KNOWN_FIRST };
        assert_eq!([1, 2].map(|ip| it.flags(ip)), [Some(expect), Some(ENDED)]);
        it.packets_have(&state);
        assert_eq!([1, 2].map(|ip| it.flags(ip)), [Some(expect), Some(ENDED)]);
        assert_eq!([1, 2].map(|ip| it.rows(ip)), [1, 2].map(|ip| before.rows(ip)));
    }
}

#[test]
fn where_uplinks_are_too_narrow_packets_are_translated_and_connections_stay() {
    let narrow = |it: &mut Written, families: &[Family]| {
        let is_due = it.layout.forwarding.set_narrow(families.iter().copied().collect());
        it.update(it.layout.state.clone());
        (is_due, it.owners(1), it.flags(1))
    };
    let owners = BTreeSet::from([Some(0), Some(1)]);
    let both = web(&[(0, 1), (1, 1)]);
    let mut it = Written::beside_packets();
    it.both(&both);
    assert_eq!(narrow(&mut it, &[Family::V6]), (true, owners.clone(), Some(KNOWN_FIRST)));
    assert_eq!(narrow(&mut it, &Family::ALL), (true, owners.clone(), Some(ENDED)));
    assert!(!narrow(&mut it, &Family::ALL).0, "nothing has changed");
    assert_eq!(narrow(&mut it, &[]), (true, owners.clone(), Some(KNOWN_FIRST)));

    // One that begins there takes what others forward.
    let mut it = Written::beside_packets();
    narrow(&mut it, &[Family::V4]);
    it.both(&both);
    assert_eq!((it.owners(1), it.flags(1)), (owners, Some(ENDED)));
    // Its rows follow those of others.
    it.both(&web(&[(1, 1), (2, 1)]));
    assert_eq!((it.owners(1), it.flags(1)), ([Some(1), Some(2)].into(), Some(ENDED)));

    // Without a second chance nothing tells the connections that were forwarded from others.
    let mut it = Written::default();
    it.update(both.clone());
    assert_eq!(narrow(&mut it, &[Family::V4]).1, [None].into());
    assert_eq!(narrow(&mut it, &[]).1, [Some(0), Some(1)].into());
}

#[test]
fn without_a_second_chance_forwarding_begins_and_ends_at_once() {
    let mut it = Written::default();
    it.update(web(&[(0, 1), (1, 1)]));
    assert_eq!(it.flags(1), Some(0));
    it.update(web(&[]));
    assert_eq!(it.forward(1), None);
}

#[test]
fn what_the_packet_path_does_not_have_yet_is_expected() {
    let mut it = Written::beside_packets();
    it.both(&web(&[]));
    it.update(web(&[(0, 1), (1, 1)]));
    assert_eq!(it.rows(1), [[None, None]], "other nodes may forward it already");
    let mut more = web(&[(0, 1), (1, 1)]);
    Arc::make_mut(&mut more.nodes).insert("n9".into(), node_at(10));
    it.update(more.clone());
    assert!(it.numbers().contains_key(&IpAddr::from([192, 0, 2, 10])), "it may send packets already");
    it.packets_have(&more);
    assert_eq!(it.owners(1), [Some(0), Some(1)].into());
    // The address of a node that goes is not taken any more, though no port is forwarded.
    it.both(&web(&[]));
    assert!(!it.numbers().contains_key(&IpAddr::from([192, 0, 2, 10])));
    assert_eq!(it.flags(1), Some(ENDED));
    let gone = state([]);
    it.update(gone.clone());
    assert!(it.packets_have(&gone), "what is left of the Service goes");
    assert_eq!(it.forward(1), None);
}

#[test]
fn forwarding_that_has_ended_begins_again_when_every_node_has_answered() {
    let mut it = Written::beside_packets();
    it.layout.forwarding.nodes.set_peers(PeerStates::new());
    it.both(&web(&[(0, 1), (1, 1)]));
    it.probed(&[(1, Answers)]);
    assert_eq!(it.flags(1), Some(KNOWN_FIRST));
    it.both(&web(&[]));
    it.both(&web(&[(0, 1), (2, 1)]));
    for states in [[(1, Answers), (2, Untried)], [(1, Answers), (2, Mute)]] {
        it.probed(&states);
        assert_eq!((it.flags(1), it.owners(1)), (Some(ENDED), [Some(0), Some(1)].into()), "{states:?}");
    }
    it.probed(&[(1, Answers), (2, Answers)]);
    assert_eq!((it.flags(1), it.owners(1)), (Some(KNOWN_FIRST), [Some(0), Some(2)].into()));
    assert!(it.rows(1).iter().any(|it| it[1] == Some(1)), "it may know connections");
}

#[test]
fn a_port_with_another_name_keeps_its_rows() {
    let renamed = |nodes: &[(u8, u32)]| {
        let mut service = service("web", 1, nodes);
        Arc::make_mut(&mut service.service).ports[0].name = "other".into();
        state([service])
    };
    let mut it = Written::beside_packets();
    it.both(&web(&[(0, 1), (1, 1)]));
    let rows = it.rows(1);
    it.update(renamed(&[(0, 1), (1, 1)]));
    assert_eq!(it.rows(1), rows, "the packet path knows it by the other name");
    it.packets_have(&renamed(&[(0, 1), (1, 1)]));
    assert_eq!((it.rows(1), it.flags(1)), (rows, Some(KNOWN_FIRST)));
}

#[test]
fn an_address_stays_with_its_service_until_the_packet_path_moves_it() {
    for (from, to) in [("a", "b"), ("b", "a")] {
        let [before, now] = [from, to].map(|it| state([service(it, 1, &[(0, 1), (1, 1)])]));
        let mut it = Written::beside_packets();
        it.both(&before);
        let rows = it.rows(1);
        it.update(now.clone());
        assert_eq!(it.rows(1), rows, "from {from} to {to}");
        it.packets_have(&now);
        assert_eq!(it.owners(1), [Some(0), Some(1)].into(), "from {from} to {to}");
    }
}

#[test]
fn with_session_affinity_clients_have_rows_across_changes_and_processes() {
    let web = |nodes: &[(u8, u32)], affinity| {
        let mut service = service("web", 1, nodes);
        Arc::make_mut(&mut service.service).affinity = affinity;
        state([service])
    };
    let affinity = Some(ClientIpAffinity { timeout_seconds: NonZeroU32::MIN });
    let nodes = [(0, 1), (1, 1)];
    let mut before = Written::beside_packets();
    for (affinity, flag) in [(affinity, BY_CLIENT), (None, 0), (affinity, BY_CLIENT)] {
        before.both(&web(&nodes, affinity));
        assert_eq!(before.flags(1), Some(KNOWN_FIRST | flag));
    }
    // Another process; also one that forwards only connections that exist.
    for (nodes, flags) in [(&nodes[..], KNOWN_FIRST), (&[][..], ENDED)] {
        let mut it = Written::beside_packets();
        it.layout.forwarding.restore(before.previous(&[1]));
        it.both(&web(nodes, affinity));
        assert_eq!(it.flags(1), Some(flags | BY_CLIENT));
    }
}
