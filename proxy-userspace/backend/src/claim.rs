//! Which of several Services at one address has it.
//!
//! The one rule: all backends decide it alike.

use std::fmt;

/// Why a Service answers at an address. Of several Services at one address the lower kind wins: nobody can take a cluster
/// IP away by naming it an external IP of his own (CVE-2020-8554).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Claim {
    /// It is its cluster IP.
    Cluster,
    /// A load balancer sends its traffic here.
    LoadBalancer,
    /// Its manifest says so.
    External,
    /// It is a port of every node.
    NodePort,
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cluster => "cluster IP",
            Self::LoadBalancer => "load balancer IP",
            Self::External => "external IP",
            Self::NodePort => "node port",
        })
    }
}
