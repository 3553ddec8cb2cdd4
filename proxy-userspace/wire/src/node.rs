//! Encodes and decodes the nodes and the ServiceCIDRs of the cluster.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;
use model::{
    NameForm,
    address::{AddressUse, canonical_range},
    state::{NodeInfo, ServiceCidr},
};
use proxy_contract::localv1;

use crate::reader::{Decoded, Reader};

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

/// Encodes a ServiceCIDR.
pub fn service_cidr(it: &ServiceCidr) -> localv1::ServiceCidr {
    localv1::ServiceCidr {
        name: it.name.to_string(),
        cidrs: it.cidrs.iter().map(ToString::to_string).collect(),
    }
}

/// Decodes a ServiceCIDR; none if its name is invalid.
pub(crate) fn decode_service_cidr(
    name: &Arc<str>,
    message: &localv1::ServiceCidr,
) -> Decoded<Option<ServiceCidr>> {
    let mut reader = Reader::new(&format!("ServiceCIDR {name}"));
    let is_named = reader.accepts("name", name, NameForm::DnsSubdomain);
    let cidrs = message.cidrs.iter().filter_map(|it| reader.parse::<IpNet>("cidrs", it));
    let cidrs = cidrs.map(canonical_range).collect();
    reader.finish(is_named.then(|| ServiceCidr { name: Arc::clone(name), cidrs }))
}
