//! Nodes of the cluster as messages, and back.

use std::net::IpAddr;

use ipnet::IpNet;
use model::state::NodeInfo;
use proxy_contract::localv1;

use crate::decode::Reader;

/// A node as a message.
pub fn node(name: &str, node: &NodeInfo) -> localv1::Node {
    localv1::Node {
        name: name.to_owned(),
        addresses: node.addresses.iter().map(ToString::to_string).collect(),
        pod_cidrs: node.pod_cidrs.iter().map(ToString::to_string).collect(),
        is_being_deleted: node.is_being_deleted,
    }
}

/// What a message says of a node; what cannot be read is refused alone.
pub(crate) fn read(
    reader: &mut Reader,
    addresses: &[String],
    ranges: &[String],
    is_being_deleted: bool,
) -> NodeInfo {
    let addresses = addresses.iter().filter_map(|it| reader.parse::<IpAddr>("addresses", it)).collect();
    let ranges = ranges.iter().filter_map(|it| reader.parse::<IpNet>("pod_cidrs", it));
    NodeInfo { addresses, pod_cidrs: ranges.map(|it| it.trunc()).collect(), is_being_deleted }
}
