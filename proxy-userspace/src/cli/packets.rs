//! Flags for traffic that has no socket here: who translates it, and what is done to its source.
//!
//! The one rule: a flag that kube-proxy has is called as there, and means the same.

use std::path::PathBuf;

use anyhow::Result;
use backend::{
    Options, ebpf,
    nft::{self, Config, DetectLocal},
};
use clap::{ArgMatches, Args, ValueEnum, parser::ValueSource};
use ipnet::IpNet;

use super::wrong_usage;

/// What is translated, and how packets are.
#[derive(Clone, Debug, Args)]
pub(super) struct PacketFlags {
    /// How connections to Services are led
    #[arg(long, value_enum, default_value = "ebpf", env = "KUBE_PROXY_EBPF_BACKEND")]
    backend: Backend,
    /// Who translates packets that have no socket on this node: those to node ports and load balancers, and those of pods
    /// that are virtual machines
    ///
    /// It counts for the whole network namespace, whatever cgroups are served or left alone. So with a --cgroup below the
    /// root it is off if nothing else is said.
    #[arg(
        long,
        value_enum,
        default_value = "nft",
        env = "KUBE_PROXY_EBPF_PACKETS",
        help_heading = "Packets"
    )]
    packets: Packets,
    /// Where pods get their addresses from, a range for each family: what comes from elsewhere to a cluster IP gets this
    /// node as its source
    #[arg(
        long,
        value_name = "CIDR",
        env = "KUBE_PROXY_EBPF_CLUSTER_CIDR",
        value_delimiter = ',',
        help_heading = "Packets"
    )]
    cluster_cidr: Vec<IpNet>,
    /// What tells traffic of this node's pods from other traffic
    #[arg(
        long,
        value_enum,
        default_value = "ClusterCIDR",
        ignore_case = true,
        env = "KUBE_PROXY_EBPF_DETECT_LOCAL_MODE",
        help_heading = "Packets"
    )]
    detect_local_mode: DetectLocalMode,
    /// The bridge that pods are behind, for --detect-local-mode BridgeInterface
    #[arg(
        long,
        value_name = "INTERFACE",
        env = "KUBE_PROXY_EBPF_POD_BRIDGE_INTERFACE",
        value_parser = interface,
        help_heading = "Packets"
    )]
    pod_bridge_interface: Option<String>,
    /// What the names of pods' interfaces begin with, for --detect-local-mode InterfaceNamePrefix
    #[arg(
        long,
        value_name = "PREFIX",
        env = "KUBE_PROXY_EBPF_POD_INTERFACE_NAME_PREFIX",
        value_parser = interface,
        help_heading = "Packets"
    )]
    pod_interface_name_prefix: Option<String>,
    /// Give all packets to cluster IPs this node as their source
    #[arg(
        long,
        value_name = "true|false",
        env = "KUBE_PROXY_EBPF_MASQUERADE_ALL",
        default_value_t = false,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        action = clap::ArgAction::Set,
        help_heading = "Packets"
    )]
    masquerade_all: bool,
    /// The bit of the packet mark that nobody else uses: it says that this node is to be the source, until that is done
    #[arg(
        long,
        value_name = "0-31",
        default_value_t = 14,
        env = "KUBE_PROXY_EBPF_NFT_MASQUERADE_BIT",
        value_parser = clap::value_parser!(u8).range(0..=31),
        help_heading = "Packets"
    )]
    nft_masquerade_bit: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Backend {
    /// Sockets by eBPF, when they connect; what has no socket here by --packets
    Ebpf,
    /// Every packet by nftables: for nodes without cgroup2, or with a kernel too old for the eBPF programs
    Nft,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Packets {
    /// nftables, in tables of our own
    Nft,
    /// Somebody else
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DetectLocalMode {
    /// It comes from an address in --cluster-cidr; without one, no source is changed for want of it
    #[value(name = "ClusterCIDR")]
    ClusterCidr,
    /// It comes from an address in the pod CIDRs of the Node object
    #[value(name = "NodeCIDR")]
    NodeCidr,
    /// It comes in by --pod-bridge-interface
    #[value(name = "BridgeInterface")]
    BridgeInterface,
    /// It comes in by an interface that begins with --pod-interface-name-prefix
    #[value(name = "InterfaceNamePrefix")]
    InterfaceNamePrefix,
}

/// The id of `--packets`, and its value by which nobody does it here.
pub(super) const ID: &str = "packets";
pub(super) const OFF: &str = "off";

/// The cgroup that was named for a command, if it is part of a machine only, and nobody has said what becomes of packets,
/// which it does not bound.
pub(super) fn bound(matches: &ArgMatches) -> Option<PathBuf> {
    let cgroup = matches.try_get_one::<PathBuf>("cgroup").ok().flatten()?;
    matches.try_get_one::<Packets>(ID).ok().flatten()?;
    let is_asked_for = matches.value_source(ID) != Some(ValueSource::DefaultValue);
    // Where all is packets, the cgroup means nothing.
    let leads_sockets = matches.get_one("backend") == Some(&Backend::Ebpf);
    (!is_asked_for && leads_sockets && ebpf::is_below_others(cgroup)).then(|| cgroup.clone())
}

impl PacketFlags {
    /// The same for the backend, with what is said of sockets.
    pub(super) fn options(self, sockets: ebpf::Options) -> Result<Options> {
        let config = Config {
            node_port_addresses: sockets.node_port_addresses.clone(),
            detect_local: self.detect_local()?,
            masquerade_all: self.masquerade_all,
            masquerade_bit: self.nft_masquerade_bit,
        };
        let packets = nft::Options { node_name: sockets.node_name.clone(), config };
        let former_pins = (self.backend == Backend::Nft).then(|| sockets.pin_dir.clone());
        let (sockets, packets) = match (self.backend, self.packets) {
            (Backend::Ebpf, Packets::Nft) => (Some(sockets), Some(packets)),
            (Backend::Ebpf, Packets::Off) => (Some(sockets), None),
            (Backend::Nft, Packets::Nft) => (None, Some(packets)),
            (Backend::Nft, Packets::Off) => {
                return Err(wrong_usage("--backend nft with --packets off would serve nothing"));
            }
        };
        Ok(Options { sockets, packets, former_pins })
    }

    fn detect_local(&self) -> Result<DetectLocal> {
        // An environment variable that is there but empty says nothing.
        let name = |value: &Option<String>| value.clone().filter(|it| !it.is_empty());
        Ok(match self.detect_local_mode {
            DetectLocalMode::ClusterCidr if self.cluster_cidr.is_empty() => DetectLocal::Off,
            DetectLocalMode::ClusterCidr => DetectLocal::ClusterCidr(self.cluster_cidr.clone()),
            DetectLocalMode::NodeCidr => DetectLocal::NodeCidr,
            DetectLocalMode::BridgeInterface => {
                let name = name(&self.pod_bridge_interface);
                DetectLocal::BridgeInterface(name.ok_or_else(|| {
                    wrong_usage("--detect-local-mode BridgeInterface needs --pod-bridge-interface")
                })?)
            }
            DetectLocalMode::InterfaceNamePrefix => {
                let prefix = name(&self.pod_interface_name_prefix);
                DetectLocal::InterfaceNamePrefix(prefix.ok_or_else(|| {
                    wrong_usage("--detect-local-mode InterfaceNamePrefix needs --pod-interface-name-prefix")
                })?)
            }
        })
    }
}

fn interface(name: &str) -> std::result::Result<String, String> {
    // `IFNAMSIZ`, less the zero byte at its end.
    const LONGEST: usize = 15;
    if name.len() > LONGEST {
        return Err(format!("no interface has a name of more than {LONGEST} bytes"));
    }
    Ok(name.into())
}
