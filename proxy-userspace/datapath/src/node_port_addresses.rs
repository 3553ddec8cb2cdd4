//! Which addresses of a node its node ports are served at.
//!
//! The rules are kube-proxy's: `detectNodeIPs` in `cmd/kube-proxy/app/server.go`, `NodePortAddresses` in `pkg/proxy/util`.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use model::{Family, state::NodeInfo};

/// Which addresses of a node its node ports are served at (`--nodeport-addresses`); the same rule for every node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// All of them, loopback included.
    #[default]
    All,
    /// The first of each family in its Node object. This node is served at all addresses of a family that has none.
    Primary {
        /// Replaces that of its family on this node (`--bind-address`).
        bind_address: Option<IpAddr>,
    },
    /// Those in one of these ranges, loopback included if it is in one; all addresses of a family without a range.
    In(Vec<IpNet>),
}

impl NodePortAddresses {
    /// The addresses of another node, in its Node object, at which its node ports are served.
    pub fn of_other(&self, node: &NodeInfo) -> Vec<IpAddr> {
        match self {
            Self::Primary { .. } => Family::ALL.iter().filter_map(|it| primary(node, *it)).collect(),
            other => node.addresses.iter().copied().filter(|it| other.contains(*it)).collect(),
        }
    }

    /// The addresses of this node at which node ports are served, of those in its Node object and on its interfaces.
    pub fn of_own(&self, node: &NodeInfo, interfaces: &BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
        let all = || interfaces.iter().chain(&node.addresses).copied();
        match self {
            Self::Primary { bind_address } => {
                let of_family = |family| {
                    let bound = bind_address.filter(|it| Family::of(*it) == family);
                    match bound.or_else(|| primary(node, family)) {
                        Some(primary) => vec![primary],
                        None => all().filter(|it| Family::of(*it) == family).collect(),
                    }
                };
                Family::ALL.into_iter().flat_map(of_family).collect()
            }
            other => all().filter(|it| other.contains(*it)).collect(),
        }
    }

    /// Whether node ports are served at a loopback address.
    pub fn has_loopback(&self, address: IpAddr) -> bool {
        !matches!(self, Self::Primary { .. }) && self.contains(address)
    }

    fn contains(&self, address: IpAddr) -> bool {
        let Self::In(ranges) = self else { return true };
        let mut of_family =
            ranges.iter().filter(|it| Family::of(it.addr()) == Family::of(address)).peekable();
        of_family.peek().is_none() || of_family.any(|it| it.contains(&address))
    }
}

fn primary(node: &NodeInfo, family: Family) -> Option<IpAddr> {
    node.addresses.iter().copied().find(|it| Family::of(*it) == family)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|it| it.parse().expect("an address")).collect()
    }

    fn within(ranges: &[&str]) -> NodePortAddresses {
        NodePortAddresses::In(ranges.iter().map(|it| it.parse().expect("a prefix")).collect())
    }

    fn primary(bind_address: Option<&str>) -> NodePortAddresses {
        NodePortAddresses::Primary { bind_address: bind_address.map(|it| it.parse().expect("an address")) }
    }

    /// A node whose Node object has these addresses, and its interfaces 192.0.2.1, 192.0.2.9 and 2001:db8::1.
    #[track_caller]
    fn check(which: &NodePortAddresses, node: &[&str], expect: &[&str]) {
        let node = NodeInfo { addresses: ips(node), ..NodeInfo::default() };
        let interfaces = ips(&["192.0.2.1", "192.0.2.9", "2001:db8::1"]).into_iter().collect();
        assert_eq!(which.of_own(&node, &interfaces).into_iter().collect::<Vec<_>>(), ips(expect));
    }

    #[test]
    fn node_ports_are_served_at_every_address() {
        let all = ["192.0.2.1", "192.0.2.9", "203.0.113.1", "2001:db8::1"];
        check(&NodePortAddresses::All, &["203.0.113.1"], &all);
        assert!(ips(&["127.0.0.1", "::1"]).into_iter().all(|it| NodePortAddresses::All.has_loopback(it)));
    }

    #[test]
    fn primary_is_the_first_of_each_family_and_bind_address_replaces_it() {
        let node = ["192.0.2.1", "2001:db8::1", "203.0.113.1"];
        check(&primary(None), &node, &["192.0.2.1", "2001:db8::1"]);
        check(&primary(Some("192.0.2.9")), &node, &["192.0.2.9", "2001:db8::1"]);
        check(&primary(Some("2001:db8::9")), &node, &["192.0.2.1", "2001:db8::9"]);
        // A family without a primary address is not restricted.
        check(&primary(None), &["203.0.113.1"], &["203.0.113.1", "2001:db8::1"]);
        check(&primary(None), &[], &["192.0.2.1", "192.0.2.9", "2001:db8::1"]);
        assert!(!ips(&["127.0.0.1", "::1"]).into_iter().any(|it| primary(None).has_loopback(it)));
    }

    #[test]
    fn ranges_restrict_only_their_family() {
        let node = ["192.0.2.1", "203.0.113.1"];
        check(&within(&["203.0.113.0/24"]), &node, &["203.0.113.1", "2001:db8::1"]);
        check(&within(&["192.0.2.8/29", "fd00::/8"]), &node, &["192.0.2.9"]);
        let loopback = |which: NodePortAddresses| {
            ips(&["127.0.0.1", "::1"]).into_iter().map(|it| which.has_loopback(it)).collect::<Vec<_>>()
        };
        assert_eq!(loopback(within(&["203.0.113.0/24"])), [false, true]);
        assert_eq!(loopback(within(&["127.0.0.0/8", "fd00::/8"])), [true, false]);
    }

    #[test]
    fn other_nodes_are_reached_at_what_their_node_objects_say() {
        let node = NodeInfo { addresses: ips(&["192.0.2.2", "203.0.113.2"]), ..NodeInfo::default() };
        assert_eq!(NodePortAddresses::All.of_other(&node), node.addresses);
        assert_eq!(primary(Some("192.0.2.9")).of_other(&node), ips(&["192.0.2.2"]));
        assert_eq!(within(&["203.0.113.0/24"]).of_other(&node), ips(&["203.0.113.2"]));
    }
}
