//! The configuration of the packet path, and its meaning on a host.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use model::{Family, state::NodeInfo};

use datapath::NodePortAddresses;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Which addresses of the host serve node ports; never loopback addresses.
    pub node_port_addresses: NodePortAddresses,
    pub detect_local: DetectLocal,
    /// Whether all traffic to cluster IPs is masqueraded.
    pub masquerade_all: bool,
    /// The bit of the packet mark that requests masquerading between two hooks, 0 to 31.
    pub masquerade_bit: u8,
    /// The pods to which connections of the host's own programs are not tracked.
    pub untracked: Vec<IpNet>,
}

/// How traffic of pods is recognized; kube-proxy's `detectLocalMode`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DetectLocal {
    /// Not at all: nothing is masqueraded by its source, and a local policy applies to pods.
    #[default]
    Off,
    /// By source address: sources in these ranges are pods, of any node.
    ClusterCidr(Vec<IpNet>),
    /// By source address: sources in `podCIDRs` of this Node are pods.
    NodeCidr,
    /// By interface: traffic from this bridge is from pods.
    BridgeInterface(String),
    /// By interface: traffic from interfaces with this name prefix is from pods.
    InterfaceNamePrefix(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Pods {
    /// The source address.
    Within(Vec<IpNet>),
    /// The incoming interface.
    Interface(String),
    /// A prefix of that interface's name.
    Prefix(String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Host {
    /// Its Node object; empty if there is none.
    pub(crate) node: NodeInfo,
    pub(crate) interfaces: BTreeSet<IpAddr>,
    /// The ranges of its cluster's cluster IPs.
    pub(crate) service_cidrs: Vec<IpNet>,
    /// Whether its kernel cannot count connections (`nft_objref`).
    pub(crate) cannot_count: bool,
}

impl Host {
    /// The addresses that serve node ports. Packets from loopback addresses cannot leave the host.
    pub(crate) fn node_port_addresses(&self, which: &NodePortAddresses) -> BTreeSet<IpAddr> {
        let mut addresses = which.of_own(&self.node, &self.interfaces);
        addresses.retain(|it| !it.is_loopback());
        addresses
    }

    /// How pods are recognized; `None` if they are not.
    pub(crate) fn pods(&self, mode: &DetectLocal, family: Family) -> Option<Pods> {
        match mode {
            DetectLocal::Off => None,
            DetectLocal::ClusterCidr(nets) => within(nets, family),
            DetectLocal::NodeCidr => within(&self.node.pod_cidrs, family),
            DetectLocal::BridgeInterface(name) => Some(Pods::Interface(name.clone())),
            DetectLocal::InterfaceNamePrefix(prefix) => Some(Pods::Prefix(prefix.clone())),
        }
    }
}

fn within(nets: &[IpNet], family: Family) -> Option<Pods> {
    let nets = of_family(nets, family);
    (!nets.is_empty()).then_some(Pods::Within(nets))
}

/// The networks of a family, merged.
pub(crate) fn of_family(nets: &[IpNet], family: Family) -> Vec<IpNet> {
    let nets: Vec<_> = nets.iter().filter(|it| Family::of(it.addr()) == family).copied().collect();
    IpNet::aggregate(&nets)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Host {
        let ip = |it: &str| it.parse().unwrap();
        Host {
            node: NodeInfo {
                addresses: vec![ip("192.168.0.2"), ip("192.168.0.3"), ip("fd00::2")],
                pod_cidrs: ["10.244.0.0/24", "fd00:10::/64"].map(|it| it.parse().unwrap()).into(),
                ..NodeInfo::default()
            },
            interfaces: ["127.0.0.1", "::1", "192.168.0.3", "192.168.0.2", "10.0.0.1", "fd00::2"]
                .map(ip)
                .into(),
            ..Host::default()
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
    fn node_ports_are_served_at_existing_addresses_except_loopback() {
        check(NodePortAddresses::All, &["10.0.0.1", "192.168.0.2", "192.168.0.3", "fd00::2"]);
        check(NodePortAddresses::Primary { bind_address: None }, &["192.168.0.2", "fd00::2"]);
        check(within(&["192.168.0.0/31", "127.0.0.0/8", "fd01::/16"]), &[]);
        check(within(&["192.168.0.2/31", "127.0.0.0/8", "fd01::/16"]), &["192.168.0.2", "192.168.0.3"]);
    }

    #[test]
    fn pods_are_recognized_by_one_mode_and_in_its_families_only() {
        // Its pods may have addresses that are not in the Node's `podCIDRs`, as with Calico.
        let cluster = DetectLocal::ClusterCidr(vec!["10.0.0.0/8".parse().expect("a prefix")]);
        let cases = [
            (DetectLocal::Off, Family::V4, None),
            (DetectLocal::NodeCidr, Family::V4, Some("10.244.0.0/24")),
            (cluster.clone(), Family::V4, Some("10.0.0.0/8")),
            (cluster, Family::V6, None),
        ];
        for (mode, family, expect) in cases {
            let expect = expect.map(|it| Pods::Within(vec![it.parse().expect("a prefix")]));
            assert_eq!(host().pods(&mode, family), expect, "{mode:?}");
        }
    }
}
