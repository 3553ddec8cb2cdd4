//! The difference between two states: a line per changed node, Service, port or endpoint.
//!
//! Invariant: applying all lines of JSON or YAML to the state before results in the state after.

use std::{cmp::Reverse, collections::BTreeMap};

use model::{
    ServiceName, diff,
    state::{
        Endpoint, EndpointKey, NodeInfo, NodeInfos, NodeState, Scope, Scopes, Service, ServicePort,
        ServiceState, TargetPort, TrafficPolicy,
    },
};
use proxy_contract::localv1;
use serde::Serialize;

use super::{
    format::{EXTENSIONS, Format, PrintError, json, yaml},
    full::render,
    table::{self, counted, kind, port_name, revision, targets},
};
use crate::publisher::Published;

/// Renders the difference, each change with a final newline; without `before`, that to the empty state.
///
/// JSON and YAML have a line or document per change. The table lists the changes, or the full state without `before`.
pub fn render_changes(
    before: Option<&Published>,
    after: &Published,
    format: Format,
) -> Result<String, PrintError> {
    let empty = NodeState::default();
    let changes = || changes(before.map_or(&empty, |it| &it.state), &after.state);
    match (format, before) {
        (Format::Table, None) => render(after, format),
        (Format::Table, Some(_)) => Ok(change_table(after, &changes())),
        (Format::Json, _) => changes().iter().map(|it| json(&Line::new(after, it))).collect(),
        (Format::Yaml, _) => changes().iter().map(|it| yaml(&Line::new(after, it))).collect(),
    }
}

/// An object that was added, changed or removed.
struct Change<'a> {
    /// `None` for a node.
    service: Option<&'a ServiceName>,
    key: Key<'a>,
    before: Option<Object>,
    after: Option<Object>,
}

/// Identifies an object, within its Service unless it is a node.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Key<'a> {
    Node(&'a str),
    /// Without its ports and endpoints.
    Service,
    /// Port number and protocol.
    Port(u16, String),
    Endpoint(&'a EndpointKey),
}

struct Object {
    message: Message,
    /// For people: headings and values; an empty value is not shown.
    details: Details,
}

type Details = Vec<(String, String)>;

/// The message of the contract.
#[derive(PartialEq, Serialize)]
#[serde(untagged)]
enum Message {
    Node(localv1::Node),
    Service(Box<localv1::Service>),
    Port(localv1::PortMapping),
    Endpoint(Box<localv1::Endpoint>),
}

/// In an order in which a port or an endpoint never exists without its Service.
fn changes<'a>(before: &'a NodeState, after: &'a NodeState) -> Vec<Change<'a>> {
    let mut changes = Vec::new();
    if !before.nodes.ptr_eq(&after.nodes) {
        changes = differing(None, node_objects(&before.nodes), node_objects(&after.nodes));
    }
    for (service, old, new) in after.diff(before) {
        let [old_objects, new_objects] =
            [old, new].map(|it| it.map(|it| service_objects(it)).unwrap_or_default());
        let mut of_service = differing(Some(service), old_objects, new_objects);
        if new.is_none() {
            of_service.sort_by_key(|it| Reverse(it.key.rank()));
        }
        changes.extend(of_service);
    }
    changes
}

fn differing<'a>(
    service: Option<&'a ServiceName>,
    before: BTreeMap<Key<'a>, Object>,
    after: BTreeMap<Key<'a>, Object>,
) -> Vec<Change<'a>> {
    fn message(it: &Option<Object>) -> Option<&Message> {
        it.as_ref().map(|it| &it.message)
    }
    diff::pairs(before, after)
        .filter(|(_, before, after)| message(before) != message(after))
        .map(|(key, before, after)| Change { service, key, before, after })
        .collect()
}

fn node_objects(nodes: &NodeInfos) -> BTreeMap<Key<'_>, Object> {
    let object = |name: &str, it: &NodeInfo| Object {
        message: Message::Node(wire::node(name, it)),
        details: details([
            ("addresses", list(&it.addresses)),
            ("pod CIDRs", list(&it.pod_cidrs)),
            ("being deleted", yes(it.is_being_deleted)),
        ]),
    };
    nodes.iter().map(|(name, it)| (Key::Node(name), object(name, it))).collect()
}

fn service_objects(state: &ServiceState) -> BTreeMap<Key<'_>, Object> {
    let service = &*state.service;
    let mut message = wire::service_with_extensions(state, EXTENSIONS);
    let port_messages = std::mem::take(&mut message.ports);
    let itself = Object { message: Message::Service(message.into()), details: service_details(service) };
    let ports = service.ports.iter().zip(port_messages).enumerate().map(|(index, (port, message))| {
        let details = port_details(state, index, port);
        (
            Key::Port(port.port.get(), port.protocol.to_string()),
            Object { message: Message::Port(message), details },
        )
    });
    let endpoints = state.endpoints.iter().map(|it| {
        let message = Message::Endpoint(wire::endpoint(service, it).into());
        (Key::Endpoint(&it.key), Object { message, details: endpoint_details(service, it) })
    });
    [(Key::Service, itself)].into_iter().chain(ports).chain(endpoints).collect()
}

impl Key<'_> {
    /// Objects of a higher rank need one of a lower rank.
    fn rank(&self) -> u8 {
        match self {
            Self::Node(_) | Self::Service => 0,
            Self::Port(..) => 1,
            Self::Endpoint(_) => 2,
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Node(_) => "node",
            Self::Service => "service",
            Self::Port(..) => "port",
            Self::Endpoint(_) => "endpoint",
        }
    }

    fn name(&self) -> Option<String> {
        match self {
            Self::Node(name) => Some((*name).to_owned()),
            Self::Service => None,
            Self::Port(number, protocol) => Some(format!("{number}/{protocol}")),
            Self::Endpoint(EndpointKey::Pod(key) | EndpointKey::Anonymous(key)) => Some(key.clone()),
        }
    }
}

/// A change as a line.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Line<'a> {
    instance_id: String,
    rev: String,
    node: &'a str,
    change: &'static str,
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    service: Option<String>,
    /// The name of a node, PORT/PROTOCOL of a port, the key of an endpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<&'a Message>,
    #[serde(skip_serializing_if = "Option::is_none")]
    after: Option<&'a Message>,
}

impl<'a> Line<'a> {
    fn new(published: &'a Published, change: &'a Change<'_>) -> Self {
        Self {
            instance_id: published.instance_id.to_string(),
            rev: published.rev.to_string(),
            node: &published.node,
            change: match (&change.before, &change.after) {
                (None, _) => "added",
                (_, None) => "removed",
                _ => "changed",
            },
            kind: change.key.kind(),
            service: change.service.map(ToString::to_string),
            name: change.key.name(),
            before: change.before.as_ref().map(|it| &it.message),
            after: change.after.as_ref().map(|it| &it.message),
        }
    }
}

/// The changes for people, without those that the table does not show, and without the ports and endpoints of Services
/// that were added or removed.
fn change_table(published: &Published, changes: &[Change<'_>]) -> String {
    let is_whole_service =
        |it: &Change<'_>| it.key == Key::Service && (it.before.is_none() || it.after.is_none());
    let mut whole = changes.iter().filter(|it| is_whole_service(it)).map(|it| it.service).collect::<Vec<_>>();
    whole.sort_unstable();
    let shown = changes.iter().filter(|it| is_whole_service(it) || whole.binary_search(&it.service).is_err());
    let rows: Vec<_> = shown.filter_map(|it| row(published, it)).collect();
    let mut text = format!("{}, {}\n", revision(published), counted(rows.len(), "change"));
    if !rows.is_empty() {
        let mut table = table::empty();
        table.add_rows(rows);
        text.push_str(&table::to_text(&table));
    }
    text
}

fn row(published: &Published, change: &Change<'_>) -> Option<[String; 4]> {
    let (sign, text) = match (&change.before, &change.after) {
        (Some(before), Some(after)) => ("~", differences(&before.details, &after.details)?),
        (None, Some(after)) if change.key == Key::Service => {
            let mut lines = shown(&after.details);
            let state = change.service.and_then(|it| published.state.services.get(it));
            lines.extend(state.into_iter().flat_map(|it| port_targets(it)));
            ("+", lines.join("\n"))
        }
        (None, Some(after)) => ("+", shown(&after.details).join("; ")),
        // The first detail suffices to recognise it.
        (before, None) => {
            let lines = before.as_ref().map(|it| shown(&it.details)).unwrap_or_default();
            ("-", lines.into_iter().next().unwrap_or_default())
        }
    };
    let service = change.service.map_or_else(|| "-".to_owned(), ToString::to_string);
    let name = change.key.name().map_or_else(String::new, |it| format!(" {it}"));
    Some([sign.to_owned(), service, format!("{}{name}", change.key.kind()), text])
}

/// The values that differ, with their headings; `None` if all are equal.
fn differences(before: &Details, after: &Details) -> Option<String> {
    let value = |side: &Details, heading: &str| {
        let found = side.iter().find(|(it, value)| it == heading && !value.is_empty());
        found.map_or("-", |(_, value)| value).to_owned()
    };
    let removed = before.iter().filter(|(heading, _)| !after.iter().any(|(it, _)| it == heading));
    let mut lines = Vec::new();
    for (heading, _) in after.iter().chain(removed) {
        let (old, new) = (value(before, heading), value(after, heading));
        if old != new {
            lines.push(format!("{heading}: {old} → {new}"));
        }
    }
    (!lines.is_empty()).then(|| lines.join("\n"))
}

fn shown(details: &Details) -> Vec<String> {
    let shown = details.iter().filter(|(_, value)| !value.is_empty());
    shown.map(|(heading, value)| format!("{heading}: {value}")).collect()
}

/// The targets of each port of a Service.
fn port_targets(state: &ServiceState) -> impl Iterator<Item = String> {
    state.service.ports.iter().enumerate().map(|(index, it)| {
        format!("{}: {}", port_name(it), targets(state, index, Scope::Internal).join(", "))
    })
}

fn service_details(service: &Service) -> Details {
    let policy = |it| match it {
        TrafficPolicy::Cluster => String::new(),
        TrafficPolicy::Local => "Local".to_owned(),
    };
    details([
        ("type", kind(service).to_owned()),
        ("cluster IPs", list(&service.cluster_ips)),
        ("external IPs", list(&service.external_ips)),
        ("load balancer IPs", list(&service.load_balancer_ips)),
        ("source ranges", list(&service.source_ranges)),
        ("internal policy", policy(service.internal_policy)),
        ("external policy", policy(service.external_policy)),
        ("affinity", service.affinity.map_or_else(String::new, |it| format!("{} s", it.timeout_seconds))),
        ("health check node port", list(service.health_check_node_port.as_slice())),
    ])
}

fn port_details(state: &ServiceState, index: usize, port: &ServicePort) -> Details {
    let other_serving = state.other_serving.iter().filter(|it| usize::from(it.index) == index);
    let other_serving: Vec<_> = other_serving.map(|it| it.target).collect();
    let target = match &port.target_port {
        TargetPort::Number(number) => number.to_string(),
        TargetPort::Name(name) => name.clone(),
    };
    let action = |has_any_endpoint| if has_any_endpoint { "drop" } else { "refuse" };
    let (v4, v6) = (action(port.has_any_endpoint.v4), action(port.has_any_endpoint.v6));
    details([
        ("name", port.name.clone()),
        ("node port", list(port.node_port.as_slice())),
        ("target", target),
        ("addresses of an older service", list(&port.conflicting_addresses)),
        ("existing flows only", list(&other_serving)),
        ("without endpoints", if v4 == v6 { v4.to_owned() } else { format!("{v4} (IPv4), {v6} (IPv6)") }),
    ])
}

fn endpoint_details(service: &Service, endpoint: &Endpoint) -> Details {
    let v4 = endpoint.v4.iter().map(ToString::to_string);
    let addresses: Vec<_> = v4.chain(endpoint.v6.iter().map(ToString::to_string)).collect();
    let mut details = details([
        ("address", addresses.join(", ")),
        ("host name", endpoint.hostname.clone()),
        ("local", yes(endpoint.local)),
    ]);
    for it in &endpoint.ports {
        let Some(port) = service.ports.get(usize::from(it.index)) else { continue };
        details.push((port_name(port), format!("{} ({})", it.port, scope_names(it.scopes))));
    }
    details
}

fn scope_names(scopes: Scopes) -> String {
    let names =
        [(scopes.internal, "internal"), (scopes.external, "external"), (scopes.cluster, "short-circuit")];
    let names: Vec<_> = names.into_iter().filter_map(|(is_in, name)| is_in.then_some(name)).collect();
    names.join(", ")
}

fn details<const N: usize>(details: [(&str, String); N]) -> Details {
    details.map(|(heading, value)| (heading.to_owned(), value)).into()
}

fn yes(flag: bool) -> String {
    if flag { "yes" } else { "" }.to_owned()
}

fn list(items: &[impl ToString]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
