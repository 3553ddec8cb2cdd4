//! `v1 Node` to a fact.

use model::facts;

use super::{Converted, label_of, objects, refuse::Refuse};

/// Reads a Node.
pub fn node(node: &objects::Node) -> Converted<facts::Node> {
    let meta = &node.metadata;
    let zone = meta.labels.as_ref().and_then(|it| it.zone.as_deref());
    let mut refuse = Refuse::new(label_of("Node", meta));
    let object = refuse
        .name("metadata.name", meta.name.as_deref().unwrap_or(""))
        .map(|name| facts::Node { name, zone: zone.filter(|zone| !zone.is_empty()).map(Into::into) });
    Converted { object, rejected: refuse.into_rejected() }
}
