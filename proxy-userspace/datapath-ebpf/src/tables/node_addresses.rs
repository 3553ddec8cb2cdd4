//! The addresses at which node ports are served, and whether each belongs to this node. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use datapath::NodePortAddresses;
use model::{Family, state::NodeInfos};
use proxy_common::tables::NodeAddrScope;

/// The addresses at which node ports are served, each with the node it belongs to. There may be thousands, and they rarely
/// change: comparing the same object with itself costs nothing.
pub(crate) type NodeAddresses = Arc<BTreeMap<IpAddr, NodeAddrScope>>;

/// The node addresses as seen from the node `own`, which has these interface addresses.
pub(crate) fn node_addresses(
    nodes: &NodeInfos,
    own: &str,
    interfaces: &BTreeSet<IpAddr>,
    which: &NodePortAddresses,
) -> NodeAddresses {
    let mut addresses = BTreeMap::new();
    for node in nodes.iter().filter(|(name, _)| &***name != own).map(|(_, node)| node) {
        addresses.extend(usable(which.of_other(node)).map(|it| (it, NodeAddrScope::REMOTE)));
    }
    // Inserted after those of other nodes: an address of this node is local even if another node claims it.
    let node = nodes.get(own).cloned().unwrap_or_default();
    // Without a Node object, or one that lists no address of the family, any address may be the node's.
    let listed = |ip: IpAddr| {
        let mut of_family = node.addresses.iter().filter(|it| Family::of(**it) == Family::of(ip)).peekable();
        of_family.peek().is_none() || of_family.any(|it| it.to_canonical() == ip)
    };
    let scope = |ip| if listed(ip) { NodeAddrScope::LOCAL } else { NodeAddrScope::INTERFACE };
    addresses.extend(usable(which.of_own(&node, interfaces)).map(|it| (it, scope(it))));
    let loopback = [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()];
    let loopback = loopback.into_iter().filter(|it| which.has_loopback(*it));
    addresses.extend(loopback.map(|it| (it, NodeAddrScope::LOOPBACK)));
    addresses.into()
}

/// Look-ups do not distinguish an IPv4 address from its v4-mapped form, and a loopback address belongs to every node.
fn usable(addresses: impl IntoIterator<Item = IpAddr>) -> impl Iterator<Item = IpAddr> {
    addresses.into_iter().map(|it| it.to_canonical()).filter(|it| !it.is_loopback())
}

#[cfg(test)]
mod tests {
    use model::state::NodeInfo;

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
            ("own".into(), node(&["192.0.2.1", "2001:db8::1", "203.0.113.1"])),
            ("other".into(), node(&["192.0.2.2", "203.0.113.2", "198.51.100.1"])),
            // v4-mapped forms, and loopback addresses.
            (
                "strange".into(),
                node(&["::ffff:192.0.2.1", "::ffff:192.0.2.2", "::ffff:127.0.0.1", "127.0.0.1"]),
            ),
        ];
        let interfaces = BTreeSet::from([ip("192.0.2.1"), ip("198.51.100.1")]);
        let expect: BTreeMap<_, _> = expect.iter().map(|(address, scope)| (ip(address), *scope)).collect();
        assert_eq!(*node_addresses(&Arc::new(nodes.into()), "own", &interfaces, &which), expect);
    }

    #[test]
    fn by_default_every_address_of_every_node_counts() {
        check(
            NodePortAddresses::All,
            &[
                ("127.0.0.1", NodeAddrScope::LOOPBACK),
                ("::1", NodeAddrScope::LOOPBACK),
                ("192.0.2.1", NodeAddrScope::LOCAL),
                ("2001:db8::1", NodeAddrScope::LOCAL),
                ("203.0.113.1", NodeAddrScope::LOCAL),
                // Another node claims it, but it is on an interface of this node.
                ("198.51.100.1", NodeAddrScope::INTERFACE),
                ("192.0.2.2", NodeAddrScope::REMOTE),
                ("203.0.113.2", NodeAddrScope::REMOTE),
            ],
        );
    }

    #[test]
    fn with_primary_only_the_primary_addresses_count() {
        check(
            NodePortAddresses::Primary { bind_address: None },
            &[
                ("192.0.2.1", NodeAddrScope::LOCAL),
                ("2001:db8::1", NodeAddrScope::LOCAL),
                ("192.0.2.2", NodeAddrScope::REMOTE),
            ],
        );
    }

    #[test]
    fn with_ranges_only_addresses_in_them_count() {
        let ranges = ["203.0.113.0/24", "127.0.0.0/8", "fd00::/8"].map(|it| it.parse().unwrap());
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
