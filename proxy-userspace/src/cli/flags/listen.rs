//! Where a brain serves, and where an agent finds it.

use anyhow::Result;
use clap::Args;
use proxy_contract::{Target, client::Client};

use super::tls::{ClientTlsFlags, ServerTlsFlags};

/// The default address of a brain.
pub(in crate::cli) const DEFAULT_SOCKET: &str = "unix:///run/kube-proxy-ebpf/proxy.sock";

/// The brain that an agent follows.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct UpstreamFlags {
    /// Address of the brain: unix:///path, tcp://host:port or host:port
    #[arg(long, value_name = "ADDRESS", default_value = DEFAULT_SOCKET)]
    target: Target,
    #[command(flatten)]
    tls: ClientTlsFlags,
}

impl UpstreamFlags {
    /// A client of the brain, for the state of a node.
    pub(in crate::cli) fn client(self, node: &str) -> Result<Client> {
        self.tls.client(Client::new(self.target, node))
    }
}

/// Where a brain serves, nowhere by default, and whose states.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct ListenFlags {
    /// Serve the node's state over gRPC at this address: unix:///path, tcp://host:port or host:port
    ///
    /// Can be repeated. Unix sockets have mode 0600. TCP addresses must be loopback addresses unless mutual TLS is enabled
    /// (--tls-cert). Services: localv1.Sets/Watch (KPNG's backends), localnetv1.Endpoints/Next, globalv1.Sets/Watch
    /// (other brains), health and reflection. With --source kube, other brains need --serve-any-node or --watch-all-nodes:
    /// otherwise only this node's own Node object is known here.
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    pub(in crate::cli) listen: Vec<Target>,
    #[command(flatten)]
    pub(in crate::cli) tls: ServerTlsFlags,
    /// Serve the state of any node on request, not only of this node
    ///
    /// The state of a node is computed while a client follows it, and for a short time after. A node without a Node object
    /// has no zone; at most 5,000 such nodes can be followed at a time. With --source kube, all Nodes are watched.
    #[arg(long)]
    pub(in crate::cli) serve_any_node: bool,
}
