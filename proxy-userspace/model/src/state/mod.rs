//! The full state of one node: the output of the brain and the input of the datapaths.
//!
//! Every decision has been made: an [`Endpoint`] is present only if this node may use it, and its [`Scopes`] say for
//! which traffic.
//! EndpointSlices, conditions, topology hints and fallbacks do not appear here.

mod endpoint;
mod forwarding;
mod load_balancing;
mod memo;
mod node;
mod service;

pub use crate::PerFamily;
pub use endpoint::{Endpoint, EndpointKey, EndpointPort, PortTarget, Scope, Scopes};
pub use forwarding::{ExternalForwarding, ForwardedPort, NodeShare, forwarding_rows};
pub use load_balancing::{Algorithm, LoadBalancing, PassiveHealth};
pub use memo::Memo;
pub use node::{NodeInfo, NodeInfos, NodeState, Pod, Pods, ServiceCidr, ServiceCidrs, Services, SocketLb};
pub use service::{
    ClientIpAffinity, EndpointDiff, Service, ServiceKind, ServicePort, ServiceState, TargetDiff, TargetPort,
    TrafficPolicy,
};

#[cfg(test)]
mod tests;
