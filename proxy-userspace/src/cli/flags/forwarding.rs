//! What becomes of packets from outside.

use clap::{Args, ValueEnum};
use model::state;

/// What becomes of packets from outside.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct ForwardingFlag {
    /// What becomes of packets from outside to external and load balancer IPs (experimental)
    ///
    /// nat translates them on the node that they enter by. dsr forwards those of the policy Cluster, of TCP and UDP, whole to
    /// a node with endpoints, which keeps the client's address and answers it directly. For dsr every node of the cluster
    /// must run this version, with the tc programs. A Service may say otherwise by the annotation
    /// kube-proxy-ebpf.io/external-forwarding.
    #[arg(long, value_name = "nat|dsr", default_value = "nat")]
    external_forwarding: ExternalForwarding,
}

/// A value of `--external-forwarding`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum ExternalForwarding {
    Nat,
    Dsr,
}

impl ForwardingFlag {
    /// The option of the brain.
    pub(in crate::cli) fn option(&self) -> state::ExternalForwarding {
        match self.external_forwarding {
            ExternalForwarding::Nat => state::ExternalForwarding::Nat,
            ExternalForwarding::Dsr => state::ExternalForwarding::Dsr,
        }
    }
}

#[cfg(test)]
impl Default for ForwardingFlag {
    fn default() -> Self {
        Self { external_forwarding: ExternalForwarding::Nat }
    }
}
