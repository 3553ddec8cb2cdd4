//! A state as a table, for people.
//!
//! The one rule: a line is as wide as what it says, whatever the terminal.

use std::fmt::Write as _;

use comfy_table::{Table, presets};
use model::{
    Family,
    state::{Scope, Service, ServiceKind, ServicePort, ServiceState},
};

use crate::Published;

/// How many endpoints a cell names.
const MOST_NAMED: usize = 3;

/// The whole state: a row for each port.
pub(super) fn full(published: &Published) -> String {
    let mut table = empty();
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
            table.add_row([
                state.service.name.to_string(),
                kind(&state.service).to_owned(),
                lines(state.service.cluster_ips.iter()),
                "no ports".to_owned(),
            ]);
        }
    }
    let services = published.state.services.len();
    let mut text = format!("{}, {}\n", revision(published), counted(services, "service"));
    if services > 0 {
        text.push_str(&written(&table));
    }
    text
}

/// Which state it is.
pub(super) fn revision(published: &Published) -> String {
    let Published { node, rev, instance_id, .. } = published;
    format!("node {node}, revision {rev} of instance {instance_id:016x}")
}

/// A number of things.
pub(super) fn counted(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// A table without lines.
pub(super) fn empty() -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table
}

/// A table as text; nothing is left of it but what it says.
pub(super) fn written(table: &Table) -> String {
    let mut text = String::new();
    for line in table.lines() {
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

pub(super) fn kind(service: &Service) -> &'static str {
    match service.kind {
        ServiceKind::ClusterIp => "ClusterIP",
        ServiceKind::NodePort => "NodePort",
        ServiceKind::LoadBalancer => "LoadBalancer",
    }
}

fn row(state: &ServiceState, index: usize, port: &ServicePort) -> [String; 8] {
    let service = &state.service;
    let node_port = port.node_port.map(|it| format!("node port {it}"));
    let external = service.external_ips.iter().chain(&service.load_balancer_ips).map(ToString::to_string);
    let outside: Vec<_> = node_port.into_iter().chain(external).collect();
    let cell = |scope| targets(state, index, scope).join("\n");
    let from_outside = |scope| if outside.is_empty() { "-".to_owned() } else { cell(scope) };
    [
        service.name.to_string(),
        kind(service).to_owned(),
        lines(service.cluster_ips.iter()),
        port_name(port),
        if outside.is_empty() { "-".to_owned() } else { outside.join("\n") },
        cell(Scope::Internal),
        from_outside(Scope::External),
        from_outside(Scope::Cluster),
    ]
}

/// A port as it is called: `80/TCP (http)`.
pub(super) fn port_name(port: &ServicePort) -> String {
    let name = if port.name.is_empty() { String::new() } else { format!(" ({})", port.name) };
    format!("{}/{}{name}", port.port, port.protocol)
}

/// Where a port leads, the first few and how many more; or what becomes of its traffic.
pub(super) fn targets(state: &ServiceState, index: usize, scope: Scope) -> Vec<String> {
    let all = [Family::V4, Family::V6].into_iter().flat_map(|it| state.targets(index, it, scope));
    let mut targets: Vec<_> = all.map(|it| it.to_string()).collect();
    if targets.is_empty() {
        let port = state.service.ports.get(index);
        return vec![
            if port.is_some_and(|it| it.has_any_endpoint.v4 || it.has_any_endpoint.v6) {
                "drop"
            } else {
                "refuse"
            }
            .into(),
        ];
    }
    let more = targets.len().saturating_sub(MOST_NAMED);
    if more > 0 {
        targets.truncate(MOST_NAMED);
        targets.push(format!("+{more}"));
    }
    targets
}

fn lines(items: impl Iterator<Item = impl ToString>) -> String {
    items.map(|it| it.to_string()).collect::<Vec<_>>().join("\n")
}
