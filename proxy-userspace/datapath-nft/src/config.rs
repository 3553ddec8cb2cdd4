//! The configuration of the packet path, and its meaning on a host.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use model::{Family, state::NodeInfo};

use datapath::NodePortAddresses;

/// The configuration of the packet path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Which addresses of the host serve node ports; never loopback addresses.
    pub node_port_addresses: NodePortAddresses,
    /// How traffic of pods is recognised.
    pub detect_local: DetectLocal,
    /// Whether all traffic to cluster IPs is masqueraded.
    pub masquerade_all: bool,
    /// The bit of the packet mark that requests masquerading between two hooks, 0 to 31.
    pub masquerade_bit: u8,
}

impl Config {
    /// The mark that requests masquerading.
    pub(super) fn mark(&self) -> u32 {
        1 << (self.masquerade_bit & 31)
    }
}

/// How traffic of pods is recognised; kube-proxy's `detectLocalMode`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DetectLocal {
    /// Not at all for masquerading. For external addresses, sources in `podCIDRs` of this Node are pods.
    #[default]
    Off,
    /// By source address: sources in these ranges are pods, of any node.
    /// For external addresses, only sources in `podCIDRs` of this Node are, if it has any.
    ClusterCidr(Vec<IpNet>),
    /// By source address: sources in `podCIDRs` of this Node are pods.
    NodeCidr,
    /// By interface: traffic from this bridge is from pods.
    BridgeInterface(String),
    /// By interface: traffic from interfaces with this name prefix is from pods.
    InterfaceNamePrefix(String),
}

/// How packets of pods are recognised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Pods {
    /// The source address.
    Within(Vec<IpNet>),
    /// The incoming interface.
    Interface(String),
    /// A prefix of that interface's name.
    Prefix(String),
}

/// The host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Host {
    /// Its Node object; empty if there is none.
    pub(super) node: NodeInfo,
    /// The addresses of the interfaces.
    pub(super) interfaces: BTreeSet<IpAddr>,
}

impl Host {
    /// The addresses that serve node ports. Packets from loopback addresses cannot leave the host.
    pub(super) fn node_port_addresses(&self, which: &NodePortAddresses) -> BTreeSet<IpAddr> {
        let interfaces = self.interfaces.iter().copied().filter(|it| which.contains(*it));
        interfaces.chain(which.of(&self.node)).filter(|it| !it.is_loopback()).collect()
    }

    /// How pods are recognised for masquerading; `None` if they are not.
    pub(super) fn pods(&self, mode: &DetectLocal, family: Family) -> Option<Pods> {
        match mode {
            DetectLocal::Off => None,
            DetectLocal::ClusterCidr(nets) => within(nets, family),
            DetectLocal::NodeCidr => within(&self.node.pod_cidrs, family),
            DetectLocal::BridgeInterface(name) => Some(Pods::Interface(name.clone())),
            DetectLocal::InterfaceNamePrefix(prefix) => Some(Pods::Prefix(prefix.clone())),
        }
    }

    /// How pods are recognised for traffic to external addresses.
    pub(super) fn internal(&self, mode: &DetectLocal, family: Family) -> Option<Pods> {
        let own = || within(&self.node.pod_cidrs, family);
        match mode {
            // Pods of other nodes are external: a local policy applies to them.
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
    fn ranges_choose_among_existing_addresses_except_loopback() {
        check(within(&["192.168.0.0/31", "127.0.0.0/8"]), &[]);
        check(within(&["192.168.0.2/31", "127.0.0.0/8"]), &["192.168.0.2", "192.168.0.3"]);
    }

    #[test]
    fn without_a_mode_pods_are_recognised_by_the_node_and_nothing_is_masqueraded() {
        let nets = vec!["10.244.0.0/24".parse().expect("a prefix")];
        assert_eq!(host().pods(&DetectLocal::Off, Family::V4), None);
        assert_eq!(host().internal(&DetectLocal::Off, Family::V4), Some(Pods::Within(nets.clone())));
        assert_eq!(host().pods(&DetectLocal::NodeCidr, Family::V4), Some(Pods::Within(nets)));
    }

    #[test]
    fn pods_of_other_nodes_are_external_if_the_node_has_pod_cidrs() {
        let net = |it: &str| it.parse::<IpNet>().expect("a prefix");
        let mode = DetectLocal::ClusterCidr(vec![net("10.244.0.0/16")]);
        assert_eq!(host().internal(&mode, Family::V4), Some(Pods::Within(vec![net("10.244.0.0/24")])));
        let cluster = Some(Pods::Within(vec![net("10.244.0.0/16")]));
        assert_eq!(host().pods(&mode, Family::V4), cluster);
        assert_eq!(Host::default().internal(&mode, Family::V4), cluster);
    }

    #[test]
    fn a_cluster_cidr_applies_to_its_own_family_only() {
        let mode = DetectLocal::ClusterCidr(vec!["10.0.0.0/8".parse().expect("a prefix")]);
        assert_eq!(host().pods(&mode, Family::V6), None);
    }
}
