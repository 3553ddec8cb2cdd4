//! `v1 Node` to a fact.

use k8s_openapi::api::core::v1;
use model::facts;

use super::{Converted, label, label_of, refuse::Refuse};

const ZONE: &str = "topology.kubernetes.io/zone";

/// Reads a Node.
pub fn node(node: &v1::Node) -> Converted<facts::Node> {
    let meta = &node.metadata;
    let mut refuse = Refuse::new(label_of("Node", meta));
    let object = refuse.name("metadata.name", meta.name.as_deref().unwrap_or("")).map(|name| facts::Node {
        name,
        zone: label(meta, ZONE).filter(|zone| !zone.is_empty()).map(Into::into),
    });
    Converted { object, rejected: refuse.into_rejected() }
}
