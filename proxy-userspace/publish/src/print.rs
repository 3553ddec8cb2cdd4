//! A published state as text: what `print` shows.
//!
//! The one rule: equal states give equal bytes, and nothing of the state is left out of JSON and YAML.

use std::fmt::Write as _;

use comfy_table::{Table, presets};
use model::{
    Family,
    state::{Scope, Service, ServiceKind, ServicePort, ServiceState},
};
use proto::localv1;
use serde::Serialize;

use crate::{Published, wire};

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
        Format::Table => table(published),
        Format::Json => serde_json::to_string(&Document::new(published))?,
        // By way of JSON, whose strings and numbers YAML must keep apart as well.
        Format::Yaml => {
            let value = serde_json::to_value(Document::new(published))?;
            format!("---\n{}", serde_saphyr::to_string(&value)?)
        }
    };
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(text)
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Document<'a> {
    // 64-bit integers are strings in proto3 JSON: many readers have only 53 bits.
    instance_id: String,
    rev: String,
    node: &'a str,
    items: Vec<Item>,
}

#[derive(Serialize)]
struct Item {
    service: localv1::Service,
    endpoints: Vec<localv1::Endpoint>,
}

impl<'a> Document<'a> {
    fn new(published: &'a Published) -> Self {
        let items = published.state.services.values().map(|it| Item {
            service: wire::service(&it.service),
            endpoints: it.endpoints.iter().map(|endpoint| wire::endpoint(&it.service, endpoint)).collect(),
        });
        Self {
            instance_id: published.instance_id.to_string(),
            rev: published.rev.to_string(),
            node: &published.node,
            items: items.collect(),
        }
    }
}

/// How many endpoints a cell of the table names.
const MOST_NAMED: usize = 3;

fn table(published: &Published) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header([
        "SERVICE",
        "TYPE",
        "CLUSTER-IPS",
        "PORT",
        "OUTSIDE",
        "INTERNAL",
        "EXTERNAL",
        "SHORT-CIRCUIT",
    ]);
    for state in published.state.services.values() {
        for (index, port) in state.service.ports.iter().enumerate() {
            table.add_row(row(state, index, port));
        }
        if state.service.ports.is_empty() {
            table.add_row([state.service.name.to_string(), kind(&state.service).to_owned()]);
        }
    }
    let mut text = format!(
        "node {}, revision {} of instance {:016x}, {} services\n",
        published.node,
        published.rev,
        published.instance_id,
        published.state.services.len()
    );
    for line in table.lines() {
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

fn kind(service: &Service) -> &'static str {
    match service.kind {
        ServiceKind::ClusterIp => "ClusterIP",
        ServiceKind::NodePort => "NodePort",
        ServiceKind::LoadBalancer => "LoadBalancer",
    }
}

fn row(state: &ServiceState, index: usize, port: &ServicePort) -> [String; 8] {
    let service = &state.service;
    let name = if port.name.is_empty() { String::new() } else { format!(" ({})", port.name) };
    let node_port = port.node_port.map(|it| format!("node port {it}"));
    let external = service.external_ips.iter().chain(&service.load_balancer_ips).map(ToString::to_string);
    let outside: Vec<_> = node_port.into_iter().chain(external).collect();
    let from_outside = |scope| if outside.is_empty() { "-".to_owned() } else { targets(state, index, scope) };
    [
        service.name.to_string(),
        kind(service).to_owned(),
        lines(service.cluster_ips.iter()),
        format!("{}/{}{name}", port.port, port.protocol),
        if outside.is_empty() { "-".to_owned() } else { outside.join("\n") },
        targets(state, index, Scope::Internal),
        from_outside(Scope::External),
        from_outside(Scope::Cluster),
    ]
}

/// Where a port leads, or what becomes of its traffic.
fn targets(state: &ServiceState, index: usize, scope: Scope) -> String {
    let targets: Vec<_> =
        [Family::V4, Family::V6].into_iter().flat_map(|it| state.targets(index, it, scope)).collect();
    if targets.is_empty() {
        let usable = state.service.ports.get(index).is_some_and(|it| it.usable.v4 || it.usable.v6);
        return if usable { "none (drop)".to_owned() } else { "none (refuse)".to_owned() };
    }
    let named = lines(targets.iter().take(MOST_NAMED));
    match targets.len().saturating_sub(MOST_NAMED) {
        0 => named,
        more => format!("{named}\nand {more} more"),
    }
}

fn lines<T: ToString>(items: impl Iterator<Item = T>) -> String {
    items.map(|it| it.to_string()).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
#[path = "print_tests.rs"]
mod tests;
