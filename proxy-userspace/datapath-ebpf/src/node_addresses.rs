//! Whose the addresses are that node ports are served at. Pure.
//!
//! The one rule: what one node says of its own addresses holds for every node alike.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use datapath::NodePortAddresses;
use model::state::{NodeInfo, NodeInfos};
use proxy_common::tables::NodeAddrScope;

use crate::layout::Places;

/// Whose each address is: of the node called `own` with these interfaces, or of another one.
pub(super) fn node_addresses(
    nodes: &NodeInfos,
    own: &str,
    interfaces: &BTreeSet<IpAddr>,
    which: &NodePortAddresses,
) -> Places {
    let mut places = Places::new();
    for node in nodes.iter().filter(|(name, _)| &***name != own).map(|(_, node)| node) {
        places.extend(named(node, which).map(|address| (address, NodeAddrScope::REMOTE)));
    }
    // What is ours stays ours, whoever else claims it.
    if let Some(node) = nodes.get(own) {
        places.extend(named(node, which).map(|address| (address, NodeAddrScope::LOCAL)));
    }
    places.extend(
        interfaces.iter().filter(|it| which.contains(**it)).map(|address| (*address, NodeAddrScope::LOCAL)),
    );
    let loopback = [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()];
    places.extend(
        loopback.into_iter().filter(|it| which.contains(*it)).map(|it| (it, NodeAddrScope::LOOPBACK)),
    );
    places
}

/// The addresses that a Node object names and that count. No look-up tells an IPv4 address from its v4-mapped form, and
/// a loopback address is everybody's own, whoever names it.
fn named<'a>(node: &'a NodeInfo, which: &'a NodePortAddresses) -> impl Iterator<Item = IpAddr> + 'a {
    which.of(node).map(|it| it.to_canonical()).filter(|it| !it.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[track_caller]
    fn check(which: NodePortAddresses, expect: &[(&str, NodeAddrScope)]) {
        let node = |addresses: &[&str]| NodeInfo {
            addresses: addresses.iter().map(|it| ip(it)).collect(),
            ..NodeInfo::default()
        };
        let nodes = [
            ("us".into(), node(&["192.0.2.1", "2001:db8::1", "203.0.113.1"])),
            ("other".into(), node(&["192.0.2.2", "203.0.113.2", "198.51.100.1"])),
            // In another form, or nobody's to name.
            (
                "strange".into(),
                node(&["::ffff:192.0.2.1", "::ffff:192.0.2.2", "::ffff:127.0.0.1", "127.0.0.1"]),
            ),
        ];
        let interfaces = BTreeSet::from([ip("192.0.2.1"), ip("198.51.100.1")]);
        let expect: Places = expect.iter().map(|(address, place)| (ip(address), *place)).collect();
        assert_eq!(node_addresses(&nodes.into_iter().collect(), "us", &interfaces, &which), expect);
    }

    #[test]
    fn every_address_of_every_node_counts() {
        check(
            NodePortAddresses::All,
            &[
                ("127.0.0.1", NodeAddrScope::LOOPBACK),
                ("::1", NodeAddrScope::LOOPBACK),
                ("192.0.2.1", NodeAddrScope::LOCAL),
                ("2001:db8::1", NodeAddrScope::LOCAL),
                ("203.0.113.1", NodeAddrScope::LOCAL),
                // Another node says it is its own; but it is on an interface of ours.
                ("198.51.100.1", NodeAddrScope::LOCAL),
                ("192.0.2.2", NodeAddrScope::REMOTE),
                ("203.0.113.2", NodeAddrScope::REMOTE),
            ],
        );
    }

    #[test]
    fn only_the_primary_addresses_count_if_so_asked() {
        check(
            NodePortAddresses::Primary,
            &[
                ("192.0.2.1", NodeAddrScope::LOCAL),
                ("2001:db8::1", NodeAddrScope::LOCAL),
                ("192.0.2.2", NodeAddrScope::REMOTE),
            ],
        );
    }

    #[test]
    fn only_addresses_in_the_ranges_count_if_some_are_given() {
        let ranges = ["203.0.113.0/24", "127.0.0.0/8"].map(|it| it.parse().unwrap());
        check(
            NodePortAddresses::In(ranges.into()),
            &[
                ("203.0.113.1", NodeAddrScope::LOCAL),
                ("203.0.113.2", NodeAddrScope::REMOTE),
                ("127.0.0.1", NodeAddrScope::LOOPBACK),
            ],
        );
    }
}
