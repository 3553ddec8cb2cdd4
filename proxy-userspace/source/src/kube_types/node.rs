//! Converts `v1 Node`.

use std::net::IpAddr;

use ipnet::IpNet;
use model::{NameForm, address::AddressUse, cluster, state};

use super::{
    conversion::{Converted, validator},
    objects,
    validation::Validator,
};

/// The taint of a node that the cluster autoscaler is about to delete.
const DELETION_TAINT: &str = "ToBeDeletedByClusterAutoscaler";

const ZONE: &str = "topology.kubernetes.io/zone";

pub fn node(node: &objects::Node) -> Converted<cluster::Node> {
    let meta = &node.metadata;
    let zone = meta.labels.as_ref().and_then(|it| it.zone.as_deref());
    let mut validator = validator("Node", meta);
    let name = validator.name("metadata.name", meta.name.as_deref().unwrap_or(""), NameForm::DnsSubdomain);
    let object = name.map(|name| cluster::Node {
        name,
        zone: validator.optional_name(format_args!("metadata.labels[{ZONE}]"), zone, NameForm::LabelValue),
        info: state::NodeInfo {
            addresses: addresses(node, &mut validator),
            pod_cidrs: pod_cidrs(node, &mut validator),
            is_being_deleted: is_being_deleted(node),
        },
    });
    Converted { object, rejected: validator.into_rejected() }
}

/// The IP addresses, those inside the cluster first, as kube-proxy sorts them (`GetNodeHostIPs` in `pkg/util/node`); host
/// names and DNS names are of no interest.
fn addresses(node: &objects::Node, validator: &mut Validator) -> Vec<IpAddr> {
    let listed = || node.status.iter().flat_map(|it| it.addresses.iter().flatten()).enumerate();
    let mut found = Vec::new();
    for kind in ["InternalIP", "ExternalIP"] {
        for (index, it) in listed().filter(|(_, it)| it.type_ == kind) {
            let field = format_args!("status.addresses[{index}].address");
            let address = validator.address(field, &it.address, AddressUse::Assigned);
            found.extend(address.filter(|it| !found.contains(it)));
        }
    }
    found
}

/// `podCIDRs`, or `podCIDR` where a hand-written manifest has only that.
fn pod_cidrs(node: &objects::Node, validator: &mut Validator) -> Vec<IpNet> {
    let Some(spec) = &node.spec else { return Vec::new() };
    let many = spec.pod_cidrs.as_deref().unwrap_or_default();
    if many.is_empty() {
        let one = spec.pod_cidr.as_deref().filter(|it| !it.is_empty());
        return one.and_then(|it| validator.cidr("spec.podCIDR", it)).into_iter().collect();
    }
    let many = many.iter().enumerate();
    many.filter_map(|(index, it)| validator.cidr(format_args!("spec.podCIDRs[{index}]"), it)).collect()
}

/// Whether load balancers should not use the node: kube-proxy's "not eligible" (KEP-3836).
fn is_being_deleted(node: &objects::Node) -> bool {
    let taints = node.spec.iter().flat_map(|it| it.taints.iter().flatten());
    node.metadata.deletion_timestamp.is_some() || { taints }.any(|it| it.key == DELETION_TAINT)
}
