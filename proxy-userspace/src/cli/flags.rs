//! Flags that more than one command has, parsed into what cannot be wrong.

use std::path::{Path, PathBuf};

use backend::ebpf::{self, NodePortAddresses};
use clap::Args;
use ipnet::IpNet;
use proto::Target;

/// Where a brain serves its own node if nothing else is said.
const SOCKET: &str = "unix:///run/kube-proxy-ebpf/proxy.sock";

/// Where the cluster's facts come from, and for which node.
#[derive(Clone, Debug, Args)]
pub(super) struct Facts {
    /// Where Services and their endpoints come from
    ///
    /// file:PATH is a manifest or a folder of manifests (Service, EndpointSlice, Node; `v1 List` too), in YAML or JSON,
    /// which is watched. The output of `kubectl get services,endpointslices,nodes -A -o yaml` is one.
    #[arg(long, value_name = "file:PATH", env = "KUBE_PROXY_EBPF_SOURCE", value_parser = source)]
    pub(super) source: Source,
    #[command(flatten)]
    pub(super) node: Node,
    #[command(flatten)]
    pub(super) selection: Selection,
}

/// The node that is served.
#[derive(Clone, Debug, Args)]
pub(super) struct Node {
    /// The node to serve, as its Node object is called [default: this host's name]
    #[arg(long, value_name = "NAME", env = "NODE_NAME", value_parser = node_name)]
    node_name: Option<String>,
}

/// Which Services are served.
#[derive(Clone, Debug, Args)]
pub(super) struct Selection {
    /// Serve only Services whose label service.kubernetes.io/service-proxy-name says this; without it, those that have
    /// no such label
    #[arg(long, value_name = "NAME", env = "KUBE_PROXY_EBPF_SERVICE_PROXY_NAME")]
    pub(super) service_proxy_name: Option<String>,
}

/// A source of facts.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// A manifest or a folder of manifests.
    File(PathBuf),
}

/// Where a brain is asked.
#[derive(Clone, Debug, Args)]
pub(super) struct Upstream {
    /// The brain to follow: unix:///path, tcp://host:port or host:port
    #[arg(long, value_name = "ADDRESS", default_value = SOCKET, env = "KUBE_PROXY_EBPF_TARGET")]
    pub(super) target: Target,
}

/// Where a brain serves, if it is told to.
#[derive(Clone, Debug, Args)]
pub(super) struct Listen {
    /// Serve the node's state to others at this address too: unix:///path, tcp://host:port or host:port
    ///
    /// Can be given several times. The socket is its owner's alone (mode 0600); a port must be one of a loopback
    /// address. What is spoken there is gRPC: localv1.Sets/Watch as KPNG's backends know it, localnetv1.Endpoints/Next,
    /// health and reflection.
    #[arg(long, value_name = "ADDRESS", env = "KUBE_PROXY_EBPF_LISTEN", value_delimiter = ',')]
    pub(super) listen: Vec<Target>,
}

/// Where a brain serves, in any case.
#[derive(Clone, Debug, Args)]
pub(super) struct Serve {
    /// Where to serve: unix:///path, tcp://host:port or host:port
    ///
    /// Can be given several times. The socket is its owner's alone (mode 0600); a port must be one of a loopback
    /// address. What is spoken there is gRPC: localv1.Sets/Watch as KPNG's backends know it, localnetv1.Endpoints/Next,
    /// health and reflection.
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = SOCKET,
        env = "KUBE_PROXY_EBPF_LISTEN",
        value_delimiter = ','
    )]
    pub(super) listen: Vec<Target>,
}

/// The kernel's side: what is served, and where it is pinned.
#[derive(Clone, Debug, Args)]
pub(super) struct DataPlane {
    #[command(flatten)]
    pins: Pins,
    /// The cgroup2 folder whose processes are served, with all below it [default: the root of the first cgroup2 mount]
    #[arg(long, value_name = "PATH", env = "KUBE_PROXY_EBPF_CGROUP", value_parser = absolute)]
    cgroup: Option<PathBuf>,
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

/// One value of `--nodeport-addresses`.
#[derive(Clone, Copy, Debug)]
enum NodePortAddress {
    Primary,
    In(IpNet),
}

impl DataPlane {
    /// The same for the backend, on the node of this name.
    pub(super) fn options(self, node: &str) -> ebpf::Options {
        let ranges: Vec<_> = self
            .node_port_addresses
            .iter()
            .filter_map(|it| if let NodePortAddress::In(range) = it { Some(*range) } else { None })
            .collect();
        let node_port_addresses = if self.node_port_addresses.is_empty() {
            NodePortAddresses::All
        } else if ranges.len() < self.node_port_addresses.len() {
            NodePortAddresses::Primary
        } else {
            NodePortAddresses::In(ranges)
        };
        ebpf::Options {
            cgroup: self.cgroup,
            pin_dir: self.pins.pin_dir,
            socket_slots: self.socket_slots.next_power_of_two(),
            affinity_clients: self.affinity_clients.next_power_of_two(),
            node_name: node.to_owned(),
            node_port_addresses,
            protect_node_ports: self.protect_node_ports,
        }
    }
}

/// Where the data plane is pinned.
#[derive(Clone, Debug, Args)]
pub(super) struct Pins {
    /// The folder for pinned maps, links and programs, on a bpf file system
    #[arg(
        long,
        value_name = "PATH",
        default_value = "/sys/fs/bpf/kube-proxy-ebpf",
        env = "KUBE_PROXY_EBPF_PIN_DIR",
        value_parser = absolute
    )]
    pub(super) pin_dir: PathBuf,
}

impl Node {
    /// Its name, the host's by default.
    pub(super) fn name(&self) -> anyhow::Result<String> {
        use anyhow::Context as _;

        if let Some(name) = &self.node_name {
            return Ok(name.clone());
        }
        let host = nix::unistd::gethostname().context("the host has no name; give one with --node-name")?;
        let host = host.to_string_lossy().trim().to_lowercase();
        node_name(&host)
            .map_err(|it| anyhow::anyhow!("{it}; the host is called so: give another with --node-name"))
    }
}

pub(super) fn source(text: &str) -> Result<Source, String> {
    match text.split_once(':') {
        Some(("file", "")) => Err("file: needs a path, as in file:manifests/".into()),
        Some(("file", path)) => Ok(Source::File(path.into())),
        Some(("api", _)) => Err("api:TARGET is not in this version yet; use file:PATH".into()),
        None if text == "kube" => Err("kube is not in this version yet; use file:PATH".into()),
        _ => Err("not a source; use file:PATH".into()),
    }
}

fn node_name(text: &str) -> Result<String, String> {
    let is_name = |it: char| it.is_ascii_lowercase() || it.is_ascii_digit() || it == '-' || it == '.';
    if text.is_empty() || text.len() > 253 || !text.chars().all(is_name) {
        return Err(format!(
            "{text:?} cannot be a node's name: lower-case letters, digits, dashes and dots only"
        ));
    }
    Ok(text.into())
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
    if path.is_absolute() { Ok(path.into()) } else { Err("not an absolute path".into()) }
}
