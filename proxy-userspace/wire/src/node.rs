//! Encodes and decodes the nodes of the cluster.

use std::net::IpAddr;

use ipnet::IpNet;
use model::{
    address::{AddressUse, canonical_range},
    state::NodeInfo,
};
use proxy_contract::localv1;

use crate::reader::Reader;

/// Encodes a node.
pub fn node(name: &str, node: &NodeInfo) -> localv1::Node {
    localv1::Node {
        name: name.to_owned(),
        addresses: node.addresses.iter().map(ToString::to_string).collect(),
        pod_cidrs: node.pod_cidrs.iter().map(ToString::to_string).collect(),
        is_being_deleted: node.is_being_deleted,
    }
}

/// Decodes a node from the fields that the messages of both APIs share.
pub(crate) fn node_info(
    reader: &mut Reader,
    addresses: &[String],
    pod_cidrs: &[String],
    is_being_deleted: bool,
) -> NodeInfo {
    let addresses = addresses
        .iter()
        .filter_map(|it| reader.address::<IpAddr>("addresses", it, AddressUse::Assigned))
        .collect();
    let pod_cidrs = pod_cidrs.iter().filter_map(|it| reader.parse::<IpNet>("pod_cidrs", it));
    NodeInfo { addresses, pod_cidrs: pod_cidrs.map(canonical_range).collect(), is_being_deleted }
}
