//! What a user can choose, and what it means on one host.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use model::{Family, state::NodeInfo};

use datapath::NodePortAddresses;

/// How packets are treated, besides what the state says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Which addresses of the host node ports are served at; never the loopback addresses.
    pub node_port_addresses: NodePortAddresses,
    /// How a pod's traffic is told from traffic of others.
    pub detect_local: DetectLocal,
    /// Whether all traffic to cluster IPs gets this node as its source.
    pub masquerade_all: bool,
    /// The bit of the packet mark that says "masquerade" between two hooks, 0 to 31.
    pub masquerade_bit: u8,
}

impl Config {
    /// The mark that says "masquerade".
    pub(super) fn mark(&self) -> u32 {
        1 << (self.masquerade_bit & 31)
    }
}

/// How traffic of pods is told from traffic of others; what kube-proxy calls `detectLocalMode`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DetectLocal {
    /// It is not, to decide what is masqueraded.
    /// To decide about traffic to external addresses, pods have the addresses of `podCIDRs` of this Node.
    #[default]
    Off,
    /// By source address: one of these is a pod's, of whichever node.
    /// To decide about traffic to external addresses, those of this node alone count, if `podCIDRs` of this Node says which.
    ClusterCidr(Vec<IpNet>),
    /// By source address: one of `podCIDRs` of this Node is a pod's.
    NodeCidr,
    /// By interface: pods are behind this bridge.
    BridgeInterface(String),
    /// By interface: those of pods begin like this.
    InterfaceNamePrefix(String),
}

/// What tells a pod's packets from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Pods {
    /// The source address.
    Within(Vec<IpNet>),
    /// The interface it came in by.
    Interface(String),
    /// The beginning of that interface's name.
    Prefix(String),
}

/// What is known of the host, beside the Services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Host {
    /// What the Node object says; nothing if there is none.
    pub(super) node: NodeInfo,
    /// The addresses of the interfaces.
    pub(super) interfaces: BTreeSet<IpAddr>,
}

impl Host {
    /// Where node ports are served. A loopback address cannot be left behind by a packet.
    pub(super) fn node_port_addresses(&self, which: &NodePortAddresses) -> BTreeSet<IpAddr> {
        let interfaces = self.interfaces.iter().copied().filter(|it| which.contains(*it));
        interfaces.chain(which.of(&self.node)).filter(|it| !it.is_loopback()).collect()
    }

    /// What tells pods of others apart when it is decided what is masqueraded; none if that is not asked for.
    pub(super) fn pods(&self, mode: &DetectLocal, family: Family) -> Option<Pods> {
        match mode {
            DetectLocal::Off => None,
            DetectLocal::ClusterCidr(nets) => within(nets, family),
            DetectLocal::NodeCidr => within(&self.node.pod_cidrs, family),
            DetectLocal::BridgeInterface(name) => Some(Pods::Interface(name.clone())),
            DetectLocal::InterfaceNamePrefix(prefix) => Some(Pods::Prefix(prefix.clone())),
        }
    }

    /// What tells pods of others apart when it is decided where traffic to an external address goes.
    pub(super) fn inside(&self, mode: &DetectLocal, family: Family) -> Option<Pods> {
        let own = || within(&self.node.pod_cidrs, family);
        match mode {
            // Pods of other nodes come from outside: under a local policy they go where load balancers send them.
            DetectLocal::ClusterCidr(_) => own().or_else(|| self.pods(mode, family)),
            _ => self.pods(mode, family).or_else(own),
        }
    }
}

fn within(nets: &[IpNet], family: Family) -> Option<Pods> {
    let nets: Vec<_> = nets.iter().filter(|it| Family::of(it.addr()) == family).copied().collect();
    let nets = IpNet::aggregate(&nets);
    (!nets.is_empty()).then_some(Pods::Within(nets))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Host {
        let ip = |it: &str| it.parse().expect("an address");
        Host {
            node: NodeInfo {
                addresses: vec![ip("192.168.0.2"), ip("192.168.0.3"), ip("fd00::2")],
                pod_cidrs: vec![
                    "10.244.0.0/24".parse().expect("a prefix"),
                    "fd00:10::/64".parse().expect("a prefix"),
                ],
                is_being_deleted: false,
            },
            interfaces: ["192.168.0.3", "192.168.0.2", "10.0.0.1", "fd00::2"].map(ip).into(),
        }
    }

    #[track_caller]
    fn check(which: NodePortAddresses, expect: &[&str]) {
        let addresses: Vec<_> = host().node_port_addresses(&which).iter().map(ToString::to_string).collect();
        assert_eq!(addresses, expect);
    }

    fn within(ranges: &[&str]) -> NodePortAddresses {
        NodePortAddresses::In(ranges.iter().map(|it| it.parse().expect("a prefix")).collect())
    }

    #[test]
    fn node_ports_are_served_at_every_address() {
        check(NodePortAddresses::All, &["10.0.0.1", "192.168.0.2", "192.168.0.3", "fd00::2"]);
    }

    #[test]
    fn primary_is_the_first_of_each_family() {
        check(NodePortAddresses::Primary, &["192.168.0.2", "fd00::2"]);
    }

    #[test]
    fn prefixes_choose_among_the_addresses_that_are_there_and_no_loopback_address_is_one() {
        check(within(&["192.168.0.0/31", "127.0.0.0/8"]), &[]);
        check(within(&["192.168.0.2/31", "127.0.0.0/8"]), &["192.168.0.2", "192.168.0.3"]);
    }

    #[test]
    fn pods_are_known_by_the_node_where_nothing_is_chosen_and_nothing_is_masqueraded_for_it() {
        let nets = vec!["10.244.0.0/24".parse().expect("a prefix")];
        assert_eq!(host().pods(&DetectLocal::Off, Family::V4), None);
        assert_eq!(host().inside(&DetectLocal::Off, Family::V4), Some(Pods::Within(nets.clone())));
        assert_eq!(host().pods(&DetectLocal::NodeCidr, Family::V4), Some(Pods::Within(nets)));
    }

    #[test]
    fn pods_of_other_nodes_are_not_inside_where_the_node_says_which_are_its_own() {
        let net = |it: &str| it.parse::<IpNet>().expect("a prefix");
        let mode = DetectLocal::ClusterCidr(vec![net("10.244.0.0/16")]);
        assert_eq!(host().inside(&mode, Family::V4), Some(Pods::Within(vec![net("10.244.0.0/24")])));
        let cluster = Some(Pods::Within(vec![net("10.244.0.0/16")]));
        assert_eq!(host().pods(&mode, Family::V4), cluster);
        assert_eq!(Host::default().inside(&mode, Family::V4), cluster);
    }

    #[test]
    fn a_cluster_cidr_of_one_family_says_nothing_of_the_other() {
        let mode = DetectLocal::ClusterCidr(vec!["10.0.0.0/8".parse().expect("a prefix")]);
        assert_eq!(host().pods(&mode, Family::V6), None);
    }
}
