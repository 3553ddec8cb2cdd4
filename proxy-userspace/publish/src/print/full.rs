//! A full state.

use proxy_contract::localv1;
use serde::Serialize;

use super::{
    format::{EXTENSIONS, Format, PrintError, json, yaml},
    table,
};
use crate::publisher::Published;

/// Renders a state, with a final newline.
pub fn render(published: &Published, format: Format) -> Result<String, PrintError> {
    match format {
        Format::Table => Ok(table::full(published)),
        Format::Json => json(&Document::new(published)),
        Format::Yaml => yaml(&Document::new(published)),
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Document<'a> {
    // 64-bit integers are strings in proto3 JSON, because many parsers have only 53 bits.
    instance_id: String,
    rev: String,
    node: &'a str,
    items: Vec<Item>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    nodes: Vec<localv1::Node>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    service_cidrs: Vec<localv1::ServiceCidr>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pods: Vec<localv1::Pod>,
}

#[derive(Serialize)]
struct Item {
    service: localv1::Service,
    endpoints: Vec<localv1::Endpoint>,
}

impl<'a> Document<'a> {
    fn new(published: &'a Published) -> Self {
        let items = published.state.services.values().map(|it| Item {
            service: wire::service_with_extensions(it, EXTENSIONS),
            endpoints: it.endpoints.iter().map(|endpoint| wire::endpoint(&it.service, endpoint)).collect(),
        });
        Self {
            instance_id: published.instance_id.to_string(),
            rev: published.rev.to_string(),
            node: &published.node,
            items: items.collect(),
            nodes: published.state.nodes.iter().map(|(name, it)| wire::node(name, it)).collect(),
            service_cidrs: published.state.service_cidrs.values().map(|it| wire::service_cidr(it)).collect(),
            pods: published.state.pods.values().map(|it| wire::pod(it)).collect(),
        }
    }
}
