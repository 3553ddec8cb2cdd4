//! A published state as text: what `print` shows.
//!
//! The one rule: equal states give equal bytes, and nothing of the state is left out of JSON and YAML.

mod changes;
mod table;

use proxy_contract::localv1;
use serde::Serialize;

use wire::Extensions;

use crate::Published;

pub use changes::render_changes;

/// How to write a state down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A table for people.
    Table,
    /// One JSON object on one line, the messages in their proto3 JSON form.
    Json,
    /// The same as a YAML document.
    Yaml,
}

/// Why a state could not be written down.
#[derive(Debug, thiserror::Error)]
pub enum PrintError {
    /// As JSON.
    #[error("the state cannot be written as json: {0}")]
    Json(#[from] serde_json::Error),
    /// As YAML.
    #[error("the state cannot be written as yaml: {0}")]
    Yaml(#[from] serde_saphyr::SerializeError),
}

/// Writes a state down, with a line end.
pub fn render(published: &Published, format: Format) -> Result<String, PrintError> {
    let mut text = match format {
        Format::Table => table::full(published),
        Format::Json => serde_json::to_string(&Document::new(published))?,
        // By way of JSON, whose strings and numbers YAML must keep apart as well.
        Format::Yaml => yaml(&Document::new(published))?,
    };
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(text)
}

/// A YAML document.
fn yaml(value: &impl Serialize) -> Result<String, PrintError> {
    Ok(format!("---\n{}", serde_saphyr::to_string(&serde_json::to_value(value)?)?))
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Document<'a> {
    // 64-bit integers are strings in proto3 JSON: many readers have only 53 bits.
    instance_id: String,
    rev: String,
    node: &'a str,
    items: Vec<Item>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    nodes: Vec<localv1::Node>,
}

/// What the messages say besides; the time of the last change is no part of the state.
const ADDITIONS: Extensions = Extensions { trigger_times: false, ..Extensions::LOCAL };

#[derive(Serialize)]
struct Item {
    service: localv1::Service,
    endpoints: Vec<localv1::Endpoint>,
}

impl<'a> Document<'a> {
    fn new(published: &'a Published) -> Self {
        let items = published.state.services.values().map(|it| Item {
            service: wire::service_with_extensions(it, ADDITIONS),
            endpoints: it.endpoints.iter().map(|endpoint| wire::endpoint(&it.service, endpoint)).collect(),
        });
        Self {
            instance_id: published.instance_id.to_string(),
            rev: published.rev.to_string(),
            node: &published.node,
            items: items.collect(),
            nodes: published.state.nodes.iter().map(|(name, it)| wire::node(name, it)).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
