//! Why a Service answers at an address.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrontendKind {
    /// Its `clusterIPs`.
    ClusterIp,
    /// Its `status.loadBalancer.ingress`.
    LoadBalancerIp,
    /// Its `externalIPs`.
    ExternalIp,
    /// Its node port, at every node.
    NodePort,
}

impl fmt::Display for FrontendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ClusterIp => "cluster IP",
            Self::LoadBalancerIp => "load balancer IP",
            Self::ExternalIp => "external IP",
            Self::NodePort => "node port",
        })
    }
}
