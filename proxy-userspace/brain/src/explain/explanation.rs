//! An explanation: plain data, which a process can send to another one.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

/// Where a connection goes, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// The node that decides.
    pub node: String,
    pub client: ExplainedClient,
    /// The address and port that it connects to.
    pub destination: SocketAddr,
    /// The transport protocol, such as `TCP`.
    pub protocol: String,
    pub verdict: Verdict,
    /// Why, in a sentence.
    pub reason: String,
    /// The Service, such as `default/web`, if there is one.
    pub service: Option<String>,
    /// The name of its port; empty if it has none.
    pub port: Option<String>,
    /// The rules that were applied, in their order.
    pub rules: Vec<AppliedRule>,
    /// The endpoints of the port in the family of the destination, those that are used first.
    pub endpoints: Vec<ExplainedEndpoint>,
}

/// What becomes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Verdict {
    /// It goes to an endpoint.
    Redirected,
    /// It fails at once.
    Refused,
    /// Its packets are dropped.
    Dropped,
    /// It goes where it is addressed to.
    Untranslated,
}

/// A rule and what it says here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AppliedRule {
    /// Its name, one word.
    pub rule: String,
    pub says: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExplainedEndpoint {
    pub endpoint: SocketAddr,
    /// Whether connections of this client may go to it.
    pub used: bool,
    pub reason: String,
    /// The name of its pod, if it has one.
    pub pod: Option<String>,
    pub node: Option<String>,
}

/// Who connects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExplainedClient {
    pub kind: ClientKind,
    /// The namespace and name of a pod, if it is known.
    pub pod: Option<String>,
    /// Its addresses, as far as they are known.
    pub addresses: Vec<IpAddr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ClientKind {
    /// A program in the node's own network namespace.
    Node,
    /// A pod of this node.
    Pod,
    /// A host outside the cluster.
    Outside,
}
