//! Flags of the nftables (packet) path, for traffic without a socket on this node.
//!
//! Invariant: a flag that kube-proxy also has keeps kube-proxy's name and meaning.

use std::path::PathBuf;

use anyhow::Result;
use clap::{ArgMatches, Args, ValueEnum, parser::ValueSource, value_parser};
use datapath::Level;
use datapath_ebpf as ebpf;
use datapath_nft::{self as nft, Config, ConntrackSettings, DetectLocal};
use ipnet::IpNet;
use reconciler::Options;

use super::{SwitchArg as _, conntrack::ConntrackFlags};
use crate::cli::output::wrong_usage;

/// Which datapaths run, and how nftables translates.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Packets")]
pub(in crate::cli) struct PacketFlags {
    /// Datapath of connections to Services
    #[arg(long, default_value = "ebpf", help_heading = "Datapath")]
    backend: Backend,
    /// Datapath of packets without a socket on this node, such as those from outside to NodePorts and load balancer
    /// addresses, and those of virtual machines
    ///
    /// Applies to the whole network namespace, regardless of --cgroup and --socket-lb-exclude-cgroup. With a --cgroup below
    /// the root, the default is off.
    #[arg(long, default_value = "nft")]
    packets: Packets,
    /// Pod CIDRs of the cluster, one per family; traffic to cluster IPs from other sources is masqueraded, and the external
    /// policy Local does not apply to packets of pods
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    cluster_cidr: Vec<IpNet>,
    /// How traffic of this node's pods is detected
    #[arg(long, default_value = "ClusterCIDR", ignore_case = true)]
    detect_local_mode: DetectLocalMode,
    /// Bridge interface of the pods, for --detect-local-mode BridgeInterface
    #[arg(long, value_name = "INTERFACE", value_parser = interface)]
    pod_bridge_interface: Option<String>,
    /// Name prefix of the pods' interfaces, for --detect-local-mode InterfaceNamePrefix
    #[arg(long, value_name = "PREFIX", value_parser = interface)]
    pod_interface_name_prefix: Option<String>,
    /// Masquerade all packets to cluster IPs; without effect on sockets that eBPF redirects
    #[arg(long, switch())]
    masquerade_all: bool,
    /// Bit of the packet mark that marks packets to masquerade; must not be used by others
    #[arg(
        long,
        value_name = "0-31",
        default_value_t = 14,
        value_parser = value_parser!(u8).range(0..=31)
    )]
    nft_masquerade_bit: u8,
    /// Do not track TCP connections of programs in the host's network to pods (in --cluster-cidr), which need no translation: a
    /// connect takes a few microseconds less
    ///
    /// Rules of others see them as untracked: network policies that let replies pass because they belong to an established
    /// connection drop those to the host, and masquerading does not apply to them.
    #[arg(long, switch())]
    nft_notrack: bool,
    #[command(flatten)]
    conntrack: ConntrackFlags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Backend {
    /// eBPF for sockets on this node; other packets as --packets says
    Ebpf,
    /// nftables for all packets: for nodes without cgroup2, or with a kernel too old for the eBPF programs
    Nft,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Packets {
    /// This program, with nftables tables of its own
    Nft,
    /// Another program, or none
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DetectLocalMode {
    /// By a source address in --cluster-cidr; without --cluster-cidr, packets of pods are not recognized
    #[value(name = "ClusterCIDR")]
    ClusterCidr,
    /// By a source address in the pod CIDRs of the Node object; not with Calico's IPAM, whose pods have other addresses
    #[value(name = "NodeCIDR")]
    NodeCidr,
    /// By the incoming interface --pod-bridge-interface
    #[value(name = "BridgeInterface")]
    BridgeInterface,
    /// By an incoming interface whose name starts with --pod-interface-name-prefix
    #[value(name = "InterfaceNamePrefix")]
    InterfaceNamePrefix,
}

/// The id of `--packets`, and the value that disables the nftables path.
pub(in crate::cli) const PACKETS: &str = "packets";
pub(in crate::cli) const PACKETS_OFF: &str = "off";

/// The `--cgroup` below the root that disables the nftables path, unless `--packets` is given: the path would apply to the
/// whole network namespace, outside the cgroup too.
pub(in crate::cli) fn implied_off(matches: &ArgMatches) -> Option<PathBuf> {
    let cgroup = matches.try_get_one::<PathBuf>("cgroup").ok().flatten()?;
    matches.try_get_one::<Packets>(PACKETS).ok().flatten()?;
    let is_given = matches.value_source(PACKETS) != Some(ValueSource::DefaultValue);
    // Without eBPF, the cgroup has no meaning.
    let uses_cgroup = matches.get_one("backend") == Some(&Backend::Ebpf);
    (!is_given && uses_cgroup && ebpf::is_nested_cgroup(cgroup)).then(|| cgroup.clone())
}

impl PacketFlags {
    /// The options of both datapaths, from those of the eBPF datapath.
    pub(in crate::cli) fn options(self, sockets: ebpf::Options) -> Result<Options> {
        let (has_sockets, has_packets) = (self.backend == Backend::Ebpf, self.packets == Packets::Nft);
        self.check_cluster_cidr()?;
        let config = Config {
            node_port_addresses: sockets.node_port_addresses.clone(),
            detect_local: self.detect_local()?,
            masquerade_all: self.masquerade_all,
            masquerade_bit: self.nft_masquerade_bit,
            untracked: self.untracked()?,
        };
        let packets = nft::Options {
            node_name: sockets.node_name.clone(),
            config,
            conntrack: self.conntrack.settings(),
            is_beside_sockets: has_sockets,
            ..nft::Options::default()
        };
        if !has_sockets && !has_packets {
            return Err(wrong_usage("--backend nft with --packets off would serve nothing"));
        }
        Ok(Options {
            stale_pin_dir: (!has_sockets).then(|| sockets.pin_dir.clone()),
            sockets: has_sockets.then_some(sockets),
            packets: has_packets.then_some(packets),
        })
    }

    /// Applies the settings of connection tracking, where packets are translated; what cannot be set is logged.
    pub(in crate::cli) fn initialize(&self) {
        match self.packets {
            Packets::Nft => apply(&self.conntrack.settings()),
            Packets::Off => {
                tracing::info!(
                    "nothing to initialize: --packets off changes no setting of connection tracking"
                );
            }
        }
    }

    /// As with kube-proxy, a family has one range.
    fn check_cluster_cidr(&self) -> Result<()> {
        for is_v4 in [true, false] {
            let mut of_family = self.cluster_cidr.iter().filter(|it| it.addr().is_ipv4() == is_v4);
            if let (Some(first), Some(second)) = (of_family.next(), of_family.next()) {
                let family = if is_v4 { "IPv4" } else { "IPv6" };
                return Err(wrong_usage(format_args!(
                    "--cluster-cidr has two {family} ranges, {first} and {second}: give one per family, which contains the \
                     addresses of all pods, or use another --detect-local-mode"
                )));
            }
        }
        Ok(())
    }

    /// The pods to which connections are not tracked.
    fn untracked(&self) -> Result<Vec<IpNet>> {
        if !self.nft_notrack {
            return Ok(Vec::new());
        }
        if self.cluster_cidr.is_empty() {
            return Err(wrong_usage("--nft-notrack needs --cluster-cidr: it says which addresses are pods'"));
        }
        if self.backend == Backend::Nft {
            return Err(wrong_usage(
                "--nft-notrack is not possible with --backend nft, which has to translate every packet",
            ));
        }
        Ok(self.cluster_cidr.clone())
    }

    fn detect_local(&self) -> Result<DetectLocal> {
        let interface = |value: &Option<String>, flag: &str| {
            // An environment variable that is set but empty counts as not set.
            value.clone().filter(|it| !it.is_empty()).ok_or_else(|| {
                let mode = self.detect_local_mode.to_possible_value().expect("no mode is skipped");
                wrong_usage(format_args!("--detect-local-mode {} needs {flag}", mode.get_name()))
            })
        };
        Ok(match self.detect_local_mode {
            DetectLocalMode::ClusterCidr if self.cluster_cidr.is_empty() => DetectLocal::Off,
            DetectLocalMode::ClusterCidr => DetectLocal::ClusterCidr(self.cluster_cidr.clone()),
            DetectLocalMode::NodeCidr => DetectLocal::NodeCidr,
            DetectLocalMode::BridgeInterface => {
                DetectLocal::BridgeInterface(interface(&self.pod_bridge_interface, "--pod-bridge-interface")?)
            }
            DetectLocalMode::InterfaceNamePrefix => DetectLocal::InterfaceNamePrefix(interface(
                &self.pod_interface_name_prefix,
                "--pod-interface-name-prefix",
            )?),
        })
    }
}

/// Applies settings of connection tracking; what cannot be set is logged.
pub(in crate::cli) fn apply(settings: &ConntrackSettings) {
    // `check` sends every rule, and none takes effect.
    let track = || drop(nft::check::host(&Config::default(), Level::Ok));
    for it in settings.apply(track) {
        tracing::warn!("{it}; `check` says what to do");
    }
}

fn interface(name: &str) -> Result<String, String> {
    // `IFNAMSIZ` without the terminating zero byte.
    const MAX_INTERFACE_NAME: usize = 15;
    if name.len() > MAX_INTERFACE_NAME {
        return Err(format!("interface names have at most {MAX_INTERFACE_NAME} bytes"));
    }
    Ok(name.into())
}
