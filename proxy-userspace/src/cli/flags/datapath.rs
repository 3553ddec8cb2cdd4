//! Flags of the eBPF datapath, and of what both datapaths share.

use std::{
    net::IpAddr,
    path::{Component, Path, PathBuf},
    time::Duration,
};

use clap::{ArgAction, Args, ValueEnum, builder::RangedI64ValueParser, value_parser};
use datapath::NodePortAddresses;
use datapath_ebpf as ebpf;
use ipnet::IpNet;
use nix::sys::sysinfo::sysinfo;

use super::{go_duration, passive_health::PassiveHealthFlags};
use crate::cli::output::wrong_usage;

/// The eBPF datapath, and what both datapaths share.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Datapath")]
pub(in crate::cli) struct DatapathFlags {
    #[command(flatten)]
    pins: PinFlags,
    /// cgroup2 folder whose sockets are load-balanced, with everything below it [default: the root cgroup, or else the
    /// first cgroup2 mount]
    ///
    /// Below the root cgroup, the nftables path is off unless --packets nft is given.
    #[arg(long, value_name = "PATH", value_parser = absolute)]
    cgroup: Option<PathBuf>,
    /// Sockets to load-balance: all, or only those in the node's own network namespace
    ///
    /// With `host`, connections of pods are left to the nftables path: for service meshes and others that must see the
    /// Service's address on the wire.
    #[arg(long, value_name = "all|host", default_value = "all")]
    socket_lb: SocketLb,
    /// cgroup2 folder whose sockets are not load-balanced, with everything below it; can be repeated
    ///
    /// For programs behind a service mesh or in a virtual machine. Their packets to Services are still translated as
    /// --packets says. The folder may be created later: until then a warning names it, and it is looked for every 5 s.
    #[arg(long, value_name = "PATH", value_delimiter = ',', value_parser = absolute)]
    socket_lb_exclude_cgroup: Vec<PathBuf>,
    #[command(flatten)]
    grace_periods: GracePeriodFlags,
    /// Number of sockets with a preallocated entry for the Service address; rounded up to a power of two [default: by the
    /// memory of the machine: 65536 up to 2 GiB, 524288 above 8 GiB]
    ///
    /// Each entry takes 64 bytes of kernel memory, by default a 512th of it. Further sockets use the table of --udp-addresses, which takes connect(2)
    /// about 300 ns longer. One network namespace may use a quarter. Used when the maps are created, until `cleanup`.
    #[arg(long, value_name = "NUMBER", value_parser = table_size())]
    socket_slots: Option<u32>,
    /// Service addresses that sockets can use beyond those in their slots, in total; rounded up to a power of two
    ///
    /// An unconnected UDP socket has its first Service address in its slot. Each further one takes about 250 bytes of kernel
    /// memory until the socket is closed, and twice that after its endpoint has changed, as long as there is room. One
    /// network namespace may use an eighth of what is free, and TCP half of all; beyond, UDP calls are left to packets, or
    /// fail with ENOBUFS where those are not translated. Used when the map is created, until `cleanup`.
    #[arg(long, value_name = "NUMBER", default_value_t = 65_536, value_parser = table_size())]
    udp_addresses: u32,
    /// Maximum number of remembered clients with session affinity, per service port and IP family; rounded up to a power of
    /// two
    ///
    /// Beyond the limit, the least recently connected client is evicted. Each takes about 150 bytes of kernel memory. Used
    /// when the map is created, until `cleanup`.
    #[arg(long, value_name = "NUMBER", default_value_t = 65_536, value_parser = table_size())]
    affinity_clients: u32,
    /// Node addresses at which NodePorts are served: CIDRs such as 192.0.2.0/24, or `primary`, the primary address of each
    /// family in the Node object [default: all, including loopback]
    ///
    /// The primary address is the first InternalIP, or else the first ExternalIP. As with kube-proxy, a family without a CIDR
    /// or a primary address is not restricted. Loopback addresses are served if a CIDR contains them, and only to programs in
    /// the node's own network namespace.
    #[arg(
        long = "nodeport-addresses",
        value_name = "CIDR|primary",
        value_delimiter = ',',
        value_parser = node_port_address
    )]
    node_port_addresses: Vec<NodePortAddress>,
    /// Primary address of this node, instead of that in the Node object, for --nodeport-addresses primary
    ///
    /// The name is kube-proxy's: nothing is bound to it. 0.0.0.0 and :: stand for no address.
    #[arg(long, value_name = "IP", value_parser = ip)]
    bind_address: Option<IpAddr>,
    /// Reject bind(2) to a NodePort with EADDRINUSE, in the node's own network namespace
    #[arg(long, value_name = "true|false", default_value_t = true, action = ArgAction::Set)]
    protect_node_ports: bool,
    /// UDP port at which nodes send each other the packets from outside that they forward; the same on every node
    #[arg(long, value_name = "PORT", default_value_t = ebpf::DEFAULT_FORWARDING_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    external_forwarding_port: u16,
    /// How long a node with endpoints may leave probes unanswered before packets from outside are forwarded to others; 0 to
    /// forward without probes
    ///
    /// A probe is one datagram per second and node, which the eBPF program answers. Packets are forwarded to no node that has
    /// never answered.
    #[arg(long, value_name = "DURATION", default_value = "3s", value_parser = peer_timeout)]
    external_forwarding_peer_timeout: Duration,
    /// Forward packets from outside in the driver of the network card (XDP), where it can
    ///
    /// Needs Linux 5.18 and native XDP. Where another XDP program is attached, that one stays, and packets are forwarded after
    /// the driver.
    #[arg(long, value_name = "true|false", default_value_t = false, action = ArgAction::Set)]
    external_forwarding_xdp: bool,
    #[command(flatten)]
    passive_health: PassiveHealthFlags,
}

/// The default of `--socket-slots`: a quarter of them, which one network namespace may use, is enough for 100,000 connections
/// above 8 GiB of memory.
fn default_socket_slots() -> u32 {
    const BYTES_PER_SLOT: u64 = 1 << 15;
    let memory = sysinfo().map_or(0, |it| it.ram_total());
    let slots = memory.next_power_of_two() / BYTES_PER_SLOT;
    u32::try_from(slots).unwrap_or(u32::MAX).clamp(16_384, 524_288)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SocketLb {
    /// Sockets in every network namespace
    All,
    /// Sockets in the node's own network namespace
    Host,
}

/// One value of `--nodeport-addresses`.
#[derive(Clone, Copy, Debug)]
enum NodePortAddress {
    Primary,
    In(IpNet),
}

impl DatapathFlags {
    fn node_port_addresses(&self) -> anyhow::Result<NodePortAddresses> {
        let range = |it: &NodePortAddress| match it {
            NodePortAddress::In(range) => Ok(*range),
            NodePortAddress::Primary => Err(wrong_usage(
                "--nodeport-addresses: `primary` cannot be combined with CIDRs; give one or the other",
            )),
        };
        Ok(match &self.node_port_addresses[..] {
            [] => NodePortAddresses::All,
            [NodePortAddress::Primary] => NodePortAddresses::Primary {
                bind_address: self.bind_address.filter(|it| !it.is_unspecified()),
            },
            all => NodePortAddresses::In(all.iter().map(range).collect::<Result<_, _>>()?),
        })
    }

    /// The options of the eBPF datapath on the node with this name. Only a command that takes the flags of pods passes them.
    pub(in crate::cli) fn options(
        self,
        node: &str,
        pods: Option<&PodFlags>,
    ) -> anyhow::Result<ebpf::Options> {
        let node_port_addresses = self.node_port_addresses()?;
        Ok(ebpf::Options {
            cgroup: self.cgroup,
            pin_dir: self.pins.pin_dir,
            rcu_expedited: self.grace_periods.rcu_expedited,
            socket_slots: self.socket_slots.unwrap_or_else(default_socket_slots).next_power_of_two(),
            udp_addresses: self.udp_addresses.next_power_of_two(),
            affinity_clients: self.affinity_clients.next_power_of_two(),
            host_only: self.socket_lb == SocketLb::Host,
            excluded_cgroups: self.socket_lb_exclude_cgroup,
            pod_annotations: pods.is_some_and(|it| it.pod_annotations),
            node_name: node.to_owned(),
            node_port_addresses,
            protect_node_ports: self.protect_node_ports,
            forwarding_port: self.external_forwarding_port,
            forwarding_in_driver: self.external_forwarding_xdp,
            forwarding_timeout: Some(self.external_forwarding_peer_timeout).filter(|it| !it.is_zero()),
            passive_health: self.passive_health.options()?,
        })
    }
}

/// Whether annotations of pods are honored.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct PodFlags {
    /// Honor the annotation kube-proxy-ebpf.io/socket-lb of pods: leave their sockets to packets
    ///
    /// `"off"` leaves all sockets of the pod, `tcp-only` those of UDP. Of an API server the metadata of Pods is watched: of this
    /// node's, or of all with --serve-any-node. The permission to list and watch Pods cannot be limited to a node's. An
    /// agent needs the flag, too. With it, each connect(2) looks the cgroup of its program up, at three levels.
    #[arg(long, help_heading = "Datapath")]
    pub(in crate::cli) pod_annotations: bool,
}

/// Where maps, links and programs are pinned.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct PinFlags {
    /// Folder of the pinned maps, links and programs, on a bpf file system
    #[arg(long, value_name = "PATH", default_value = "/sys/fs/bpf/kube-proxy-ebpf", value_parser = absolute)]
    pub(in crate::cli) pin_dir: PathBuf,
}

/// How grace periods of the kernel are shortened.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct GracePeriodFlags {
    /// The kernel's switch for short grace periods; in a container, a mount of it, since /sys is read-only there; empty to leave
    /// it alone
    ///
    /// An update waits until no program reads what the one before has replaced: up to 25 ms. The switch is set during this
    /// wait, which then takes about 0.1 ms and interrupts busy CPUs. Not used on nodes with nohz_full CPUs.
    #[arg(long, value_name = "PATH", default_value = "/sys/kernel/rcu_expedited", value_parser = absolute_or_empty)]
    pub(in crate::cli) rcu_expedited: PathBuf,
}

fn table_size() -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(1..=1 << 24)
}

fn node_port_address(text: &str) -> Result<NodePortAddress, String> {
    match text {
        "primary" => Ok(NodePortAddress::Primary),
        range => range
            .parse()
            .map(NodePortAddress::In)
            .map_err(|_| "neither `primary` nor a CIDR such as 192.0.2.0/24".into()),
    }
}

fn ip(text: &str) -> Result<IpAddr, String> {
    model::address::parse(text).ok_or_else(|| "not an IP address such as 192.0.2.1".into())
}

fn peer_timeout(text: &str) -> Result<Duration, String> {
    let timeout = go_duration(text).filter(|it| text == "0" || *it >= ebpf::MIN_FORWARDING_TIMEOUT);
    timeout
        .ok_or_else(|| "use 2s or more, since one probe may be lost; or 0 to forward without probes".into())
}

fn absolute_or_empty(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() { Ok(PathBuf::new()) } else { absolute(text) }
}

fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = Path::new(text);
    if !path.is_absolute() {
        return Err("not an absolute path".into());
    }
    // The depth of a cgroup is derived from its path.
    if path.components().any(|it| it == Component::ParentDir) {
        return Err("contains `..`; give the resolved path".into());
    }
    Ok(path.into())
}
