//! Flags that more than one command has, parsed into what cannot be wrong.

use std::{
    ffi::OsString,
    net::SocketAddr,
    path::{Component, Path, PathBuf},
};

use admin::{Admin, Bind, Endpoint, HealthChecks, Servers, Site};
use backend::ebpf::{self, NodePortAddresses};
use clap::{Args, ValueEnum};
use ipnet::IpNet;
use proto::{Target, TargetError, client::Client};
use source::kube::Access;

use super::{tls, wrong_usage};

/// Where a brain serves its own node if nothing else is said.
const SOCKET: &str = "unix:///run/kube-proxy-ebpf/proxy.sock";

/// Where the cluster's facts come from, and for which node.
#[derive(Clone, Debug, Args)]
pub(super) struct Facts {
    /// Where Services and their endpoints come from
    ///
    /// file:PATH is a manifest or a folder of manifests (Service, EndpointSlice, Node; `v1 List` too), in YAML or JSON,
    /// which is watched. The output of `kubectl get services,endpointslices,nodes -A -o yaml` is one.
    ///
    /// kube is an API server, which is watched too: that of --kubeconfig, or of the cluster that this is a pod of.
    ///
    /// api:TARGET is another brain, ours or KPNG's, at unix:///path, tcp://host:port or host:port: as in
    /// api:unix:///run/brain.sock. Its facts are followed (globalv1.Sets/Watch), and all is decided here; if it has none
    /// to give, its state of this node is taken over as it is (localv1.Sets/Watch), and no other node can be served.
    #[arg(long, value_name = "kube|file:PATH|api:TARGET", env = "KUBE_PROXY_EBPF_SOURCE", value_parser = source)]
    pub(super) source: Source,
    #[command(flatten)]
    pub(super) api_server: ApiServer,
    #[command(flatten)]
    pub(super) source_tls: tls::SourceFlags,
    #[command(flatten)]
    pub(super) node: Node,
    #[command(flatten)]
    pub(super) selection: Selection,
}

/// Where the API server is, and who asks.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct ApiServer {
    /// The kubeconfig to reach the API server with [default: what the pod is given]
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    kubeconfig: Option<OsString>,
    /// The API server's own address, whatever the kubeconfig or the pod's environment says
    ///
    /// A pod is given the address of the Service default/kubernetes, which this proxy serves from what the API server
    /// says: it should go by another one, such as the control plane's endpoint.
    #[arg(long, alias = "master", value_name = "URL", env = "KUBE_PROXY_EBPF_KUBE_API_SERVER")]
    kube_api_server: Option<String>,
}

/// The node that is served.
#[derive(Clone, Debug, Args)]
pub(super) struct Node {
    /// The node to serve, as its Node object is called [default: this host's name]
    #[arg(
        long,
        value_name = "NAME",
        env = "NODE_NAME",
        value_parser = node_name,
        visible_alias = "hostname-override"
    )]
    node_name: Option<String>,
}

/// Which Services are served.
#[derive(Clone, Debug, Args)]
pub(super) struct Selection {
    /// Serve only Services whose label service.kubernetes.io/service-proxy-name says this; without it, those that have
    /// no such label
    #[arg(long, value_name = "NAME", env = "KUBE_PROXY_EBPF_SERVICE_PROXY_NAME")]
    service_proxy_name: Option<String>,
    /// kube-proxy's feature gates that are known here: AllowServiceExternalIPs=false serves no external IPs (KEP-5707)
    #[arg(
        long,
        value_name = "NAME=BOOL,…",
        env = "KUBE_PROXY_EBPF_FEATURE_GATES",
        value_parser = feature_gates
    )]
    feature_gates: Vec<FeatureGates>,
}

/// What was said of kube-proxy's feature gates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct FeatureGates {
    allow_service_external_ips: Option<bool>,
}

impl Selection {
    /// The same for the brain.
    pub(super) fn options(&self) -> brain::Options {
        let mut options = brain::Options {
            // An environment variable that is there but empty says nothing.
            service_proxy_name: self.service_proxy_name.clone().filter(|it| !it.is_empty()),
            ..brain::Options::default()
        };
        // As with kube-proxy, the last word on a gate counts.
        if let Some(is_on) =
            self.feature_gates.iter().filter_map(|it| it.allow_service_external_ips).next_back()
        {
            options.external_ips = is_on;
        }
        options
    }
}

/// A source of facts.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// A manifest or a folder of manifests.
    File(PathBuf),
    /// Another brain.
    Api(Target),
    /// An API server.
    Kube,
}

/// Where a brain is asked.
#[derive(Clone, Debug, Args)]
pub(super) struct Upstream {
    /// The brain to follow: unix:///path, tcp://host:port or host:port
    #[arg(long, value_name = "ADDRESS", default_value = SOCKET, env = "KUBE_PROXY_EBPF_TARGET")]
    pub(super) target: Target,
    #[command(flatten)]
    pub(super) tls: tls::ClientFlags,
}

impl Upstream {
    /// A client of the brain, for the state of a node.
    pub(super) fn client(self, node: &str) -> anyhow::Result<Client> {
        self.tls.client(Client::new(self.target, node))
    }
}

/// Where a brain serves, if it is told to.
#[derive(Clone, Debug, Args)]
pub(super) struct Listen {
    /// Serve the node's state to others at this address too: unix:///path, tcp://host:port or host:port
    ///
    /// Can be given several times. The socket is its owner's alone (mode 0600); a port must be one of a loopback
    /// address, unless there is mutual TLS (--tls-cert). What is spoken there is gRPC: localv1.Sets/Watch as KPNG's
    /// backends know it, localnetv1.Endpoints/Next, globalv1.Sets/Watch for other brains, health and reflection.
    #[arg(long, value_name = "ADDRESS", env = "KUBE_PROXY_EBPF_LISTEN", value_delimiter = ',')]
    pub(super) listen: Vec<Target>,
    #[command(flatten)]
    pub(super) tls: tls::ServerFlags,
}

/// Where a brain serves, in any case.
#[derive(Clone, Debug, Args)]
pub(super) struct Serve {
    /// Where to serve: unix:///path, tcp://host:port or host:port
    ///
    /// Can be given several times. The socket is its owner's alone (mode 0600); a port must be one of a loopback
    /// address, unless there is mutual TLS (--tls-cert). What is spoken there is gRPC: localv1.Sets/Watch as KPNG's
    /// backends know it, localnetv1.Endpoints/Next, globalv1.Sets/Watch for other brains, health and reflection.
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = SOCKET,
        env = "KUBE_PROXY_EBPF_LISTEN",
        value_delimiter = ','
    )]
    pub(super) listen: Vec<Target>,
    #[command(flatten)]
    pub(super) tls: tls::ServerFlags,
}

/// Whose states a brain serves.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct AnyNode {
    /// Serve the state of any node on request, not only of this one
    ///
    /// A node's state is decided while somebody follows it, and for a short while after. A node that no Node object is
    /// called like is in no zone; of those, 5,000 can be followed at a time.
    #[arg(long, env = "KUBE_PROXY_EBPF_SERVE_ANY_NODE")]
    pub(super) serve_any_node: bool,
}

/// The kernel's side: what is served, and where it is pinned.
#[derive(Clone, Debug, Args)]
pub(super) struct DataPlane {
    #[command(flatten)]
    pins: Pins,
    /// The cgroup2 folder whose processes are served, with all below it [default: the root of the first cgroup2 mount]
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
    /// For programs in the hands of a service mesh or of a virtual machine. It may come later: until then it is told that
    /// it is missing, and looked for every five seconds.
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
    pub(super) fn health_checks(&self, admin: &Admin, node: &str) -> anyhow::Result<HealthChecks> {
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
    pub(super) fn options(self, node: &str) -> anyhow::Result<ebpf::Options> {
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

/// Where a node tells how it is.
#[derive(Clone, Debug, Args)]
pub(super) struct Reports {
    /// Where to be asked for health: IP:PORT; 0 or nothing for nowhere
    ///
    /// /healthz is for load balancers, /livez and /readyz are for probes, with the bodies and rules of kube-proxy: 503 if
    /// a change has waited for a minute to be applied, if the programs are not in effect, or (/healthz) if the node is
    /// about to go. The unspecified address of either family stands for all addresses of both.
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "0.0.0.0:10256",
        env = "KUBE_PROXY_EBPF_HEALTHZ_BIND_ADDRESS",
        help_heading = "Reports"
    )]
    healthz_bind_address: Bind<10256>,
    /// Where to be asked for metrics: IP:PORT; 0 or nothing for nowhere
    ///
    /// /metrics is for Prometheus; /status says how the process stands, /state what it serves (both JSON).
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1:10249",
        env = "KUBE_PROXY_EBPF_METRICS_BIND_ADDRESS",
        help_heading = "Reports"
    )]
    metrics_bind_address: Bind<10249>,
}

impl Reports {
    /// Where to be asked for health.
    pub(super) fn health(&self) -> Option<SocketAddr> {
        self.healthz_bind_address.0
    }

    /// Where to be asked for metrics.
    pub(super) fn metrics(&self) -> Option<SocketAddr> {
        self.metrics_bind_address.0
    }
}

/// Where a brain tells how it is, if it is told to: beside an agent on the same node, kube-proxy's ports are the agent's.
#[derive(Clone, Debug, Args)]
pub(super) struct BrainReports {
    /// Where to be asked for health, if anywhere: IP:PORT
    ///
    /// /healthz, /livez and /readyz, as in `run`, but for the data plane.
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "0",
        env = "KUBE_PROXY_EBPF_BRAIN_HEALTHZ_BIND_ADDRESS",
        help_heading = "Reports"
    )]
    healthz_bind_address: Bind<10256>,
    /// Where to be asked for metrics, if anywhere: IP:PORT
    ///
    /// /metrics is for Prometheus; /status says how the process stands, /state what it decided (both JSON).
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "0",
        env = "KUBE_PROXY_EBPF_BRAIN_METRICS_BIND_ADDRESS",
        help_heading = "Reports"
    )]
    metrics_bind_address: Bind<10249>,
}

impl Reports {
    /// Begins to tell. Must be called within a tokio runtime.
    pub(super) fn serve(&self, admin: &Admin) -> Servers {
        serve_reports(admin, self.healthz_bind_address, self.metrics_bind_address)
    }
}

impl BrainReports {
    /// Begins to tell. Must be called within a tokio runtime.
    pub(super) fn serve(&self, admin: &Admin) -> Servers {
        serve_reports(admin, self.healthz_bind_address, self.metrics_bind_address)
    }
}

fn serve_reports(admin: &Admin, healthz: Bind<10256>, metrics: Bind<10249>) -> Servers {
    let health =
        healthz.0.map(|address| Endpoint { site: Site::Health, address, flag: "healthz-bind-address" });
    let metrics =
        metrics.0.map(|address| Endpoint { site: Site::Metrics, address, flag: "metrics-bind-address" });
    Servers::start(admin, health.into_iter().chain(metrics))
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

impl ApiServer {
    /// The same for the source.
    pub(super) fn access(&self) -> Access {
        // An environment variable that is there but empty says nothing.
        Access {
            kubeconfig: self.kubeconfig.clone().filter(|it| !it.is_empty()),
            server: self.kube_api_server.clone().filter(|it| !it.is_empty()),
        }
    }
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
        Some(("api", target)) => target.parse().map(Source::Api).map_err(|it: TargetError| it.to_string()),
        None if text == "kube" => Ok(Source::Kube),
        _ => Err("not a source; use kube, file:PATH or api:TARGET".into()),
    }
}

fn feature_gates(text: &str) -> Result<FeatureGates, String> {
    let mut gates = FeatureGates::default();
    for gate in text.split(',').filter(|it| !it.is_empty()) {
        let (name, value) = gate.split_once('=').ok_or("write it as NAME=true or NAME=false")?;
        let is_on = match value {
            "1" | "t" | "T" | "true" | "True" | "TRUE" => true,
            "0" | "f" | "F" | "false" | "False" | "FALSE" => false,
            _ => return Err(format!("{value:?} is neither true nor false")),
        };
        match name {
            "AllowServiceExternalIPs" => gates.allow_service_external_ips = Some(is_on),
            _ => return Err(format!("{name:?} is not known here; AllowServiceExternalIPs is")),
        }
    }
    Ok(gates)
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
    if !path.is_absolute() {
        return Err("not an absolute path".into());
    }
    // How far down a cgroup is is counted in the path itself.
    if path.components().any(|it| it == Component::ParentDir) {
        return Err("has a `..`: name the place itself".into());
    }
    Ok(path.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(texts: &[&str], expect: Result<bool, &str>) {
        let gates: Result<Vec<_>, _> = texts.iter().map(|it| feature_gates(it)).collect();
        let options =
            gates.map(|feature_gates| Selection { service_proxy_name: None, feature_gates }.options());
        match (options, expect) {
            (Ok(options), Ok(expect)) => assert_eq!(options.external_ips, expect, "{texts:?}"),
            (Err(error), Err(expect)) => assert!(error.contains(expect), "{texts:?}: {error}"),
            (got, _) => panic!("{texts:?}: {got:?}"),
        }
    }

    #[test]
    fn external_ips_are_served_unless_the_feature_gate_says_no() {
        check(&[], Ok(true));
        check(&[""], Ok(true));
        check(&["AllowServiceExternalIPs=false"], Ok(false));
        check(&["AllowServiceExternalIPs=false", "AllowServiceExternalIPs=1"], Ok(true));
        check(&["AllowServiceExternalIPs=T,AllowServiceExternalIPs=False"], Ok(false));
        check(&["AllowServiceExternalIPs"], Err("NAME=true"));
        check(&["AllowServiceExternalIPs=no"], Err("\"no\""));
        check(&["Magic=true"], Err("\"Magic\" is not known here"));
    }
}
