//! A state as a table for people; its width does not depend on the terminal.

use std::{iter, sync::Arc};

use model::{
    Family, counted,
    state::{Scope, ServicePort, ServiceState},
};
use publish::Published;

/// How many endpoints a cell lists.
const MAX_LISTED: usize = 3;

const HEADER: [&str; 8] =
    ["SERVICE", "TYPE", "CLUSTER-IPS", "PORT", "EXPOSED", "INTERNAL", "EXTERNAL", "SHORT-CIRCUIT"];

/// A row of the table; a cell may have several lines.
type Row = [String; HEADER.len()];

/// The parts of the full state, each rendered when it is asked for: a row per port. For the widths of the columns, every row is
/// made once before.
pub(super) fn parts(published: &Published) -> impl Iterator<Item = String> + Send + use<> {
    let services = published.state.services.clone();
    let head = format!("{}, {}\n", revision(published), counted(services.len(), "service"));
    let has_rows = !services.is_empty();
    let rows = move || iter::once(HEADER.map(Into::into)).chain(services.into_values().flat_map(rows));
    let mut widths = [0; HEADER.len()];
    for row in rows.clone()() {
        for (width, cell) in widths.iter_mut().zip(&row) {
            *width = cell.lines().map(|it| it.chars().count()).chain([*width]).max().unwrap_or_default();
        }
    }
    let text = move |row| text_of_row(&row, &widths);
    iter::once(head).chain(has_rows.then(rows).into_iter().flatten().map(text))
}

/// The lines of a row, without trailing spaces.
fn text_of_row(row: &Row, widths: &[usize; HEADER.len()]) -> String {
    let height = row.iter().map(|it| it.lines().count()).max().unwrap_or_default();
    let cell = |n: usize, (cell, width): (&String, &usize)| {
        format!(" {:width$} ", cell.lines().nth(n).unwrap_or_default())
    };
    let line = |n| row.iter().zip(widths).map(|it| cell(n, it)).collect::<String>();
    (0..height).map(|n| format!("{}\n", line(n).trim_end())).collect()
}

/// Node, revision and instance.
pub(super) fn revision(published: &Published) -> String {
    let Published { node, rev, instance_id, .. } = published;
    format!("node {node}, revision {rev} of instance {instance_id:016x}")
}

fn rows(state: Arc<ServiceState>) -> Vec<Row> {
    let service = &state.service;
    if service.ports.is_empty() {
        let (name, kind) = (service.name.to_string(), service.kind.to_string());
        let ips = lines(service.cluster_ips.iter());
        let none = || String::new();
        return vec![[name, kind, ips, "no ports".into(), none(), none(), none(), none()]];
    }
    service.ports.iter().enumerate().map(|(index, port)| row(&state, index, port)).collect()
}

fn row(state: &ServiceState, index: usize, port: &ServicePort) -> Row {
    let service = &state.service;
    let node_port = port.node_port.map(|it| format!("node port {it}"));
    let external = service.external_ips.iter().chain(&service.load_balancer_ips).map(ToString::to_string);
    let addresses: Vec<_> = node_port.into_iter().chain(external).collect();
    let cell = |scope| targets(state, index, scope).join("\n");
    let external_cell = |scope| if addresses.is_empty() { "-".to_owned() } else { cell(scope) };
    [
        service.name.to_string(),
        service.kind.to_string(),
        lines(service.cluster_ips.iter()),
        port_name(port),
        if addresses.is_empty() { "-".to_owned() } else { addresses.join("\n") },
        cell(Scope::Internal),
        external_cell(Scope::External),
        external_cell(Scope::Cluster),
    ]
}

/// For example `80/TCP (http)`.
pub(super) fn port_name(port: &ServicePort) -> String {
    let name = if port.name.is_empty() { String::new() } else { format!(" ({})", port.name) };
    format!("{}/{}{name}", port.port, port.protocol)
}

/// The first targets of a port and the number of further ones; or what happens to its traffic if there are none.
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
    let more = targets.len().saturating_sub(MAX_LISTED);
    if more > 0 {
        targets.truncate(MAX_LISTED);
        targets.push(format!("+{more}"));
    }
    targets
}

fn lines(items: impl Iterator<Item = impl ToString>) -> String {
    items.map(|it| it.to_string()).collect::<Vec<_>>().join("\n")
}
