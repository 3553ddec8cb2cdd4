//! What differs between two states, a line for each Service, port or endpoint.
//!
//! The one rule: whoever applies every line of JSON or YAML to the state before has the state after it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use model::{
    ServiceName, diff,
    state::{
        Endpoint, NodeInfo, NodeInfos, NodeState, Scope, Scopes, Service, ServiceState, TargetPort,
        TrafficPolicy,
    },
};
use proxy_contract::localv1;
use serde::Serialize;

use super::{
    ADDITIONS, Format, PrintError,
    table::{self, counted, kind, port_name, revision, targets, written},
    yaml,
};
use crate::Published;

/// Writes down what `after` changes, each change with a line end; everything, if nothing was before.
///
/// For people that is a table of changes, or the whole state if nothing was before; else a line of JSON or a YAML
/// document for each change.
pub fn render_changes(
    before: Option<&Published>,
    after: &Published,
    format: Format,
) -> Result<String, PrintError> {
    let nothing = NodeState::default();
    let changes = changes(before.map_or(&nothing, |it| &it.state), &after.state);
    let mut text = String::new();
    match (format, before) {
        (Format::Table, None) => return super::render(after, format),
        (Format::Table, Some(_)) => return Ok(table(after, &changes)),
        (Format::Json, _) => {
            for it in &changes {
                let _ = writeln!(text, "{}", serde_json::to_string(&Line::new(after, it))?);
            }
        }
        (Format::Yaml, _) => {
            for it in &changes {
                text.push_str(&yaml(&Line::new(after, it))?);
            }
        }
    }
    Ok(text)
}

/// One change; what was not there before was added, what is not there after was removed.
struct Change<'a> {
    /// None for a node.
    service: Option<&'a ServiceName>,
    before: Option<Thing<'a>>,
    after: Option<Thing<'a>>,
}

#[derive(Clone, Copy)]
enum Thing<'a> {
    Node(&'a str, &'a NodeInfo),
    /// A Service without its ports and endpoints.
    Service(&'a Service),
    /// The port at this position.
    Port(&'a ServiceState, usize),
    Endpoint(&'a Service, &'a Endpoint),
}

/// In an order in which a port or an endpoint is never there without its Service.
fn changes<'a>(before: &'a NodeState, after: &'a NodeState) -> Vec<Change<'a>> {
    let mut changes = nodes(&before.nodes, &after.nodes);
    for (service, old, new) in after.diff(before) {
        let (old, new) = (old.map(|it| &**it), new.map(|it| &**it));
        let change = |(before, after)| Change { service: Some(service), before, after };
        let itself = change(itself(old, new));
        if itself.after.is_some() {
            changes.push(itself);
            changes.extend(ports(old, new).into_iter().chain(endpoints(old, new)).map(change));
        } else {
            changes.extend(endpoints(old, new).into_iter().chain(ports(old, new)).map(change));
            // Neither before nor after: the Service itself is as it was.
            changes.extend(itself.before.is_some().then_some(itself));
        }
    }
    changes
}

fn nodes<'a>(old: &'a NodeInfos, new: &'a NodeInfos) -> Vec<Change<'a>> {
    if old.ptr_eq(new) {
        return Vec::new();
    }
    let of = |nodes: &'a NodeInfos| nodes.iter().map(|(name, it)| (&**name, Thing::Node(name, it))).collect();
    let changes = differing_things(of(old), of(new)).into_iter();
    changes.map(|(before, after)| Change { service: None, before, after }).collect()
}

type Sides<'a> = (Option<Thing<'a>>, Option<Thing<'a>>);

fn itself<'a>(old: Option<&'a ServiceState>, new: Option<&'a ServiceState>) -> Sides<'a> {
    let of = |it: Option<&'a ServiceState>| it.map(|it| Thing::Service(&it.service));
    differing(of(old), of(new)).unwrap_or_default()
}

fn ports<'a>(old: Option<&'a ServiceState>, new: Option<&'a ServiceState>) -> Vec<Sides<'a>> {
    pairs(old, new, |state| {
        let ports = state.service.ports.iter().enumerate();
        ports.map(|(index, it)| ((it.port, it.protocol.to_string()), Thing::Port(state, index))).collect()
    })
}

fn endpoints<'a>(old: Option<&'a ServiceState>, new: Option<&'a ServiceState>) -> Vec<Sides<'a>> {
    pairs(old, new, |state| {
        state.endpoints.iter().map(|it| (&it.key, Thing::Endpoint(&state.service, it))).collect()
    })
}

/// What differs among the things of two states.
fn pairs<'a, K: Ord>(
    old: Option<&'a ServiceState>,
    new: Option<&'a ServiceState>,
    things: impl Fn(&'a ServiceState) -> BTreeMap<K, Thing<'a>>,
) -> Vec<Sides<'a>> {
    let [old, new] = [old, new].map(|it| it.map(&things).unwrap_or_default());
    differing_things(old, new)
}

/// What differs among things, in the order of their keys.
fn differing_things<'a, K: Ord>(old: BTreeMap<K, Thing<'a>>, new: BTreeMap<K, Thing<'a>>) -> Vec<Sides<'a>> {
    diff::pairs(old, new).filter_map(|(_, old, new)| differing(old, new)).collect()
}

fn differing<'a>(old: Option<Thing<'a>>, new: Option<Thing<'a>>) -> Option<Sides<'a>> {
    (old.map(Thing::message) != new.map(Thing::message)).then_some((old, new))
}

/// A thing as the contract says it.
#[derive(PartialEq, Serialize)]
#[serde(untagged)]
enum Message {
    Node(localv1::Node),
    Service(Box<localv1::Service>),
    Port(localv1::PortMapping),
    Endpoint(Box<localv1::Endpoint>),
}

impl Thing<'_> {
    fn message(self) -> Message {
        match self {
            Self::Service(it) => {
                let message = wire::service(it);
                Message::Service(localv1::Service { ports: Vec::new(), ..message }.into())
            }
            Self::Node(name, it) => Message::Node(wire::node(name, it)),
            Self::Port(state, index) => {
                let mut ports = wire::service_with_extensions(state, ADDITIONS).ports;
                Message::Port(if index < ports.len() { ports.swap_remove(index) } else { Default::default() })
            }
            Self::Endpoint(service, it) => Message::Endpoint(wire::endpoint(service, it).into()),
        }
    }

    fn kind(self) -> &'static str {
        match self {
            Self::Service(_) => "service",
            Self::Node(..) => "node",
            Self::Port(..) => "port",
            Self::Endpoint(..) => "endpoint",
        }
    }

    /// What it is called, a port or an endpoint within its Service.
    fn name(self) -> Option<String> {
        match self {
            Self::Service(_) => None,
            Self::Node(name, _) => Some(name.to_owned()),
            Self::Port(state, index) => {
                state.service.ports.get(index).map(|it| format!("{}/{}", it.port, it.protocol))
            }
            Self::Endpoint(_, it) => Some(wire::endpoint_key(it).to_owned()),
        }
    }

    /// What there is to say of it to people, under its headings.
    fn details(self) -> Vec<(String, String)> {
        match self {
            Self::Service(it) => service_details(it),
            Self::Node(_, it) => node_details(it),
            Self::Port(state, index) => port_details(state, index),
            Self::Endpoint(service, it) => endpoint_details(service, it),
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
    /// A node's, PORT/PROTOCOL of a port, the key of an endpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<Message>,
    #[serde(skip_serializing_if = "Option::is_none")]
    after: Option<Message>,
}

impl<'a> Line<'a> {
    fn new(published: &'a Published, change: &Change<'_>) -> Self {
        Self {
            instance_id: published.instance_id.to_string(),
            rev: published.rev.to_string(),
            node: &published.node,
            change: match (change.before, change.after) {
                (None, _) => "added",
                (_, None) => "removed",
                _ => "changed",
            },
            kind: change.thing().map_or("", Thing::kind),
            service: change.service.map(ToString::to_string),
            name: change.thing().and_then(Thing::name),
            before: change.before.map(Thing::message),
            after: change.after.map(Thing::message),
        }
    }
}

impl<'a> Change<'a> {
    fn thing(&self) -> Option<Thing<'a>> {
        self.after.or(self.before)
    }
}

/// The changes for people: what is the same for them is left out, and so is what goes without saying.
fn table(published: &Published, changes: &[Change<'_>]) -> String {
    let mut table = table::empty();
    // Its endpoints come and go with it.
    let whole = changes.iter().filter(|it| it.is_whole_service()).map(|it| it.service);
    let whole: BTreeSet<_> = whole.collect();
    let mut shown = 0;
    for it in changes {
        if whole.contains(&it.service) && !it.is_whole_service() {
            continue;
        }
        let Some(row) = row(published, it) else { continue };
        table.add_row(row);
        shown += 1;
    }
    let mut text = format!("{}, {}\n", revision(published), counted(shown, "change"));
    if shown > 0 {
        text.push_str(&written(&table));
    }
    text
}

impl Change<'_> {
    /// Whether a Service came or went.
    fn is_whole_service(&self) -> bool {
        matches!((self.before, self.after), (None, Some(Thing::Service(_))) | (Some(Thing::Service(_)), None))
    }
}

fn row(published: &Published, change: &Change<'_>) -> Option<[String; 4]> {
    let thing = change.thing()?;
    let what = match (thing.kind(), thing.name()) {
        (kind, Some(name)) => format!("{kind} {name}"),
        (kind, None) => kind.to_owned(),
    };
    let (mark, details) = match (change.before, change.after) {
        (Some(before), Some(after)) => ("~", differences(&before.details(), &after.details())?),
        (None, Some(after @ Thing::Service(_))) => {
            let mut said = said(&after.details());
            let state = change.service.and_then(|it| published.state.services.get(it));
            said.extend(state.map(|it| led(it)).unwrap_or_default());
            ("+", said.join("\n"))
        }
        (None, Some(after)) => ("+", said(&after.details()).join("; ")),
        (before, None) => {
            // The first is enough to know it again.
            let details = before.map(Thing::details).unwrap_or_default();
            ("-", said(&details).into_iter().next().unwrap_or_default())
        }
    };
    let service = change.service.map_or_else(|| "-".to_owned(), ToString::to_string);
    Some([mark.to_owned(), service, what, details])
}

/// What differs, heading by heading; none if nothing does.
fn differences(before: &[(String, String)], after: &[(String, String)]) -> Option<String> {
    let of = |side: &[(String, String)], heading: &str| {
        let found = side.iter().find(|(it, _)| it == heading);
        found.map_or("-", |(_, value)| if value.is_empty() { "-" } else { value }).to_owned()
    };
    let gone = before.iter().filter(|(heading, _)| !after.iter().any(|(it, _)| it == heading));
    let mut lines = Vec::new();
    for (heading, _) in after.iter().chain(gone) {
        let (old, new) = (of(before, heading), of(after, heading));
        if old != new {
            lines.push(format!("{heading}: {old} → {new}"));
        }
    }
    (!lines.is_empty()).then(|| lines.join("\n"))
}

fn said(details: &[(String, String)]) -> Vec<String> {
    let said = details.iter().filter(|(_, value)| !value.is_empty());
    said.map(|(heading, value)| format!("{heading}: {value}")).collect()
}

/// Where each port of a Service leads.
fn led(state: &ServiceState) -> Vec<String> {
    let ports = state.service.ports.iter().enumerate();
    ports
        .map(|(index, it)| {
            format!("{}: {}", port_name(it), targets(state, index, Scope::Internal).join(", "))
        })
        .collect()
}

fn service_details(service: &Service) -> Vec<(String, String)> {
    let policy = |it| match it {
        TrafficPolicy::Cluster => String::new(),
        TrafficPolicy::Local => "Local".to_owned(),
    };
    [
        ("type", kind(service).to_owned()),
        ("cluster IPs", list(&service.cluster_ips)),
        ("external IPs", list(&service.external_ips)),
        ("load balancer IPs", list(&service.load_balancer_ips)),
        ("source ranges", list(&service.source_ranges)),
        ("internal policy", policy(service.internal_policy)),
        ("external policy", policy(service.external_policy)),
        ("affinity", service.affinity.map_or_else(String::new, |it| format!("{} s", it.timeout_seconds))),
        (
            "health check node port",
            service.health_check_node_port.map_or_else(String::new, |it| it.to_string()),
        ),
    ]
    .map(|(heading, value)| (heading.to_owned(), value))
    .into()
}

fn node_details(node: &NodeInfo) -> Vec<(String, String)> {
    [
        ("addresses", list(&node.addresses)),
        ("pod CIDRs", list(&node.pod_cidrs)),
        ("about to go", if node.is_being_deleted { "yes" } else { "" }.to_owned()),
    ]
    .map(|(heading, value)| (heading.to_owned(), value))
    .into()
}

fn port_details(state: &ServiceState, index: usize) -> Vec<(String, String)> {
    let Some(port) = state.service.ports.get(index) else { return Vec::new() };
    let unselected = state.other_serving.iter().filter(|it| usize::from(it.index) == index);
    let unselected: Vec<_> = unselected.map(|it| it.target).collect();
    let target = match &port.target_port {
        TargetPort::Number(number) => number.to_string(),
        TargetPort::Name(name) => name.clone(),
    };
    let empty = |usable| if usable { "drop" } else { "refuse" };
    let (v4, v6) = (empty(port.has_any_endpoint.v4), empty(port.has_any_endpoint.v6));
    [
        ("name", port.name.clone()),
        ("node port", port.node_port.map_or_else(String::new, |it| it.to_string())),
        ("target", target),
        ("lost to an older service", list(&port.conflicting_addresses)),
        ("only for flows that are there", list(&unselected)),
        ("without endpoints", if v4 == v6 { v4.to_owned() } else { format!("{v4} (IPv4), {v6} (IPv6)") }),
    ]
    .map(|(heading, value)| (heading.to_owned(), value))
    .into()
}

fn endpoint_details(service: &Service, endpoint: &Endpoint) -> Vec<(String, String)> {
    let v4 = endpoint.v4.iter().map(ToString::to_string);
    let addresses: Vec<_> = v4.chain(endpoint.v6.iter().map(ToString::to_string)).collect();
    let mut details = vec![
        ("address".to_owned(), addresses.join(", ")),
        ("host name".to_owned(), endpoint.hostname.clone()),
        ("on this node".to_owned(), if endpoint.local { "yes" } else { "" }.to_owned()),
    ];
    for it in &endpoint.ports {
        let Some(port) = service.ports.get(usize::from(it.index)) else { continue };
        details.push((port_name(port), format!("{} ({})", it.port, traffic(it.scopes))));
    }
    details
}

fn traffic(scopes: Scopes) -> String {
    let names =
        [(scopes.internal, "internal"), (scopes.external, "external"), (scopes.cluster, "short-circuit")];
    let names: Vec<_> = names.into_iter().filter_map(|(is_in, name)| is_in.then_some(name)).collect();
    names.join(", ")
}

fn list(items: &[impl ToString]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
