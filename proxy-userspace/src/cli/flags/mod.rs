//! Flags that more than one command has, parsed into what cannot be wrong.

mod data_plane;
mod reports;
mod selection;

use std::{ffi::OsString, path::PathBuf};

use anyhow::Context as _;
use clap::Args;
use proxy_contract::{Target, TargetError, client::Client};
use source::kube::Access;

pub(super) use self::{
    data_plane::{DataPlane, Pins},
    reports::{BrainReports, Reports},
    selection::Selection,
};
use super::tls;

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

impl Node {
    /// Its name, the host's by default.
    pub(super) fn name(&self) -> anyhow::Result<String> {
        if let Some(name) = &self.node_name {
            return Ok(name.clone());
        }
        let host = nix::unistd::gethostname().context("the host has no name; give one with --node-name")?;
        let host = host.to_string_lossy().trim().to_lowercase();
        node_name(&host)
            .map_err(|it| anyhow::anyhow!("{it}; the host is called so: give another with --node-name"))
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
pub(super) struct ServeAnyNode {
    /// Serve the state of any node on request, not only of this one
    ///
    /// A node's state is decided while somebody follows it, and for a short while after. A node that no Node object is
    /// called like is in no zone; of those, 5,000 can be followed at a time.
    #[arg(long, env = "KUBE_PROXY_EBPF_SERVE_ANY_NODE")]
    pub(super) serve_any_node: bool,
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

fn node_name(text: &str) -> Result<String, String> {
    let is_name = |it: char| it.is_ascii_lowercase() || it.is_ascii_digit() || it == '-' || it == '.';
    if text.is_empty() || text.len() > 253 || !text.chars().all(is_name) {
        return Err(format!(
            "{text:?} cannot be a node's name: lower-case letters, digits, dashes and dots only"
        ));
    }
    Ok(text.into())
}
