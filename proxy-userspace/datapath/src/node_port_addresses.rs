//! Which addresses of a node its node ports are served at.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use model::state::NodeInfo;

/// Which addresses of a node its node ports are served at (`--nodeport-addresses`); the same rule for every node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// All of them, loopback included.
    #[default]
    All,
    /// The first of each family in its Node object.
    Primary,
    /// Those in one of these ranges, loopback included if it is in one.
    In(Vec<IpNet>),
}

impl NodePortAddresses {
    /// The addresses of a Node object at which node ports are served.
    pub fn of<'a>(&'a self, node: &'a NodeInfo) -> impl Iterator<Item = IpAddr> + 'a {
        let first = |v4| node.addresses.iter().find(move |it| it.is_ipv4() == v4);
        let primary = [first(true), first(false)];
        node.addresses.iter().copied().filter(move |it| match self {
            Self::Primary => primary.contains(&Some(it)),
            other => other.contains(*it),
        })
    }

    /// The addresses of this node at which node ports are served, without loopback; `None` if that is all of them.
    pub fn own(&self, node: &NodeInfo, interfaces: &BTreeSet<IpAddr>) -> Option<BTreeSet<IpAddr>> {
        let interfaces = interfaces.iter().copied().filter(|it| self.contains(*it));
        (*self != Self::All).then(|| interfaces.chain(self.of(node)).collect())
    }

    /// Whether node ports are served at an interface's address.
    pub fn contains(&self, address: IpAddr) -> bool {
        match self {
            Self::All => true,
            Self::Primary => false,
            Self::In(ranges) => ranges.iter().any(|it| it.contains(&address)),
        }
    }
}
