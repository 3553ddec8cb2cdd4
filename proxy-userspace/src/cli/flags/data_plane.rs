//! The kernel's side: what is served there, and where it is pinned.

use std::path::{Component, Path, PathBuf};

use admin::{Admin, HealthChecks};
use backend::ebpf::{self, NodePortAddresses};
use clap::{Args, ValueEnum};
use ipnet::IpNet;

use crate::cli::wrong_usage;

/// The kernel's side: what is served, and where it is pinned.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct DataPlane {
    #[command(flatten)]
    pins: Pins,
    /// The cgroup2 folder whose processes are served, with all below it [default: the machine's root cgroup, or else
    /// that of the first cgroup2 mount]
    ///
    /// It bounds sockets, not packets: below the root, those are translated only if --packets nft is given.
    #[arg(long, value_name = "PATH", env = "KUBE_PROXY_EBPF_CGROUP", value_parser = absolute)]
    cgroup: Option<PathBuf>,
    /// Whose sockets are translated: all, or only those in the node's own network namespace
    ///
    /// With host, what pods send to a Service is left to the packet path: for service meshes and others that must see the
    /// Service's address on the wire.
    #[arg(
        long,
        value_enum,
        value_name = "all|host",
        default_value = "all",
        env = "KUBE_PROXY_EBPF_SOCKET_LB"
    )]
    socket_lb: SocketLb,
    /// A cgroup2 folder whose processes, with all below, are not translated; can be given several times
    ///
    /// For programs in the hands of a service mesh or of a virtual machine. Only their sockets are left alone: packets that
    /// they send to a Service are translated on their way, as --packets says. It may come later: until then it is told that it
    /// is missing, and looked for every five seconds.
    #[arg(
        long,
        value_name = "PATH",
        env = "KUBE_PROXY_EBPF_SOCKET_LB_EXCLUDE_CGROUP",
        value_delimiter = ',',
        value_parser = absolute
    )]
    socket_lb_exclude_cgroup: Vec<PathBuf>,
    /// How many connected sockets have a ready place for the address they were translated from; rounded up to a power of
    /// two
    ///
    /// Each takes 64 bytes of kernel memory. A socket beyond that makes room of its own, which takes its connect some
    /// 700 ns longer. Counts when the places are first made, until `cleanup`.
    #[arg(
        long,
        value_name = "NUMBER",
        default_value_t = 65_536,
        env = "KUBE_PROXY_EBPF_SOCKET_SLOTS",
        value_parser = clap::value_parser!(u32).range(1..=1 << 24)
    )]
    socket_slots: u32,
    /// How many Service addresses unconnected UDP sockets can remember beyond the first four of each, all sockets
    /// together; rounded up to a power of two
    ///
    /// Each takes about 250 bytes of kernel memory while it is remembered, until its socket is closed; it counts as two
    /// once its endpoint has changed, as long as there is room. What cannot be remembered cannot be sent: it fails with
    /// ENOBUFS. Counts when the room is first made, until `cleanup`.
    #[arg(
        long,
        value_name = "NUMBER",
        default_value_t = 65_536,
        env = "KUBE_PROXY_EBPF_UDP_ADDRESSES",
        value_parser = clap::value_parser!(u32).range(1..=1 << 24)
    )]
    udp_addresses: u32,
    /// How many clients of Services with session affinity are remembered, each for a service port and an IP version;
    /// rounded up to a power of two
    ///
    /// Beyond that, who connected longest ago is forgotten first. Each takes about 150 bytes of kernel memory. Counts when
    /// the room is first made, until `cleanup`.
    #[arg(
        long,
        value_name = "NUMBER",
        default_value_t = 65_536,
        env = "KUBE_PROXY_EBPF_AFFINITY_CLIENTS",
        value_parser = clap::value_parser!(u32).range(1..=1 << 24)
    )]
    affinity_clients: u32,
    /// Which addresses of a node its node ports are served at: ranges as in 192.0.2.0/24, or `primary`, the first of each
    /// family that its Node object names [default: all, the loopback addresses among them]
    ///
    /// The loopback addresses are served if a range has them in it, and only to programs in the node's own network
    /// namespace.
    #[arg(
        long = "nodeport-addresses",
        value_name = "CIDR|primary",
        env = "KUBE_PROXY_EBPF_NODEPORT_ADDRESSES",
        value_delimiter = ',',
        value_parser = node_port_address
    )]
    node_port_addresses: Vec<NodePortAddress>,
    /// Keep programs in the node's own network namespace from binding a node port: they would wait there for nobody
    #[arg(
        long,
        value_name = "true|false",
        default_value_t = true,
        env = "KUBE_PROXY_EBPF_PROTECT_NODE_PORTS",
        action = clap::ArgAction::Set
    )]
    protect_node_ports: bool,
}

/// The value of `--socket-lb`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SocketLb {
    /// Sockets of every network namespace
    All,
    /// Sockets of the node's own network namespace
    Host,
}

/// One value of `--nodeport-addresses`.
#[derive(Clone, Copy, Debug)]
enum NodePortAddress {
    Primary,
    In(IpNet),
}

impl DataPlane {
    /// Who tells load balancers of the endpoints on the node of this name.
    pub(in crate::cli) fn health_checks(&self, admin: &Admin, node: &str) -> anyhow::Result<HealthChecks> {
        Ok(HealthChecks::new(admin, node, self.node_port_addresses()?))
    }

    fn node_port_addresses(&self) -> anyhow::Result<NodePortAddresses> {
        let mut ranges = Vec::new();
        for it in &self.node_port_addresses {
            match it {
                NodePortAddress::In(range) => ranges.push(*range),
                NodePortAddress::Primary if self.node_port_addresses.len() == 1 => {
                    return Ok(NodePortAddresses::Primary);
                }
                NodePortAddress::Primary => {
                    return Err(wrong_usage(
                        "--nodeport-addresses: `primary` stands alone; give either it or ranges",
                    ));
                }
            }
        }
        Ok(if ranges.is_empty() { NodePortAddresses::All } else { NodePortAddresses::In(ranges) })
    }

    /// The same for the backend, on the node of this name.
    pub(in crate::cli) fn options(self, node: &str) -> anyhow::Result<ebpf::Options> {
        let node_port_addresses = self.node_port_addresses()?;
        Ok(ebpf::Options {
            cgroup: self.cgroup,
            pin_dir: self.pins.pin_dir,
            socket_slots: self.socket_slots.next_power_of_two(),
            udp_addresses: self.udp_addresses.next_power_of_two(),
            affinity_clients: self.affinity_clients.next_power_of_two(),
            host_only: self.socket_lb == SocketLb::Host,
            excluded_cgroups: self.socket_lb_exclude_cgroup,
            node_name: node.to_owned(),
            node_port_addresses,
            protect_node_ports: self.protect_node_ports,
        })
    }
}

/// Where the data plane is pinned.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct Pins {
    /// The folder for pinned maps, links and programs, on a bpf file system
    #[arg(
        long,
        value_name = "PATH",
        default_value = "/sys/fs/bpf/kube-proxy-ebpf",
        env = "KUBE_PROXY_EBPF_PIN_DIR",
        value_parser = absolute
    )]
    pub(in crate::cli) pin_dir: PathBuf,
}

fn node_port_address(text: &str) -> Result<NodePortAddress, String> {
    match text {
        "primary" => Ok(NodePortAddress::Primary),
        range => range
            .parse()
            .map(NodePortAddress::In)
            .map_err(|_| "neither `primary` nor a range as in 192.0.2.0/24".into()),
    }
}

fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = Path::new(text);
    if !path.is_absolute() {
        return Err("not an absolute path".into());
    }
    // How far down a cgroup is is counted in the path itself.
    if path.components().any(|it| it == Component::ParentDir) {
        return Err("has a `..`: name the place itself".into());
    }
    Ok(path.into())
}
