//! The difference between two states: a line per changed ServiceCIDR, node, Service, port or endpoint.
//!
//! Invariant: applying all lines of JSON or YAML to the state before results in the state after.

use std::{
    borrow::Cow,
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use anyhow::{Context as _, Result};
use comfy_table::{Table, presets};
use model::{
    ServiceName, counted, diff, escaped_line,
    state::{NodeState, Scope, ServiceState},
};
use publish::{PRINTED_EXTENSIONS, Published};
use serde::Serialize;
use serde_json::{Value, to_value};

use super::{
    Format, JSON, render,
    table::{port_name, revision, targets},
    yaml,
};

/// What the table shows of an object that was added, changed or removed.
const SIGNS: [&str; 3] = ["+", "~", "-"];
/// How many characters of a text the table shows; no name is longer.
const MAX_SHOWN: usize = 253;

/// Renders the difference, each change with a final newline; without `before`, that to the empty state.
///
/// JSON and YAML have a line or document per change. The table lists the changes, or the full state without `before`.
pub(in crate::cli) fn render_changes(
    before: Option<&Published>,
    after: &Published,
    format: Format,
) -> Result<String> {
    let empty = NodeState::default();
    let changes = || changes(before.map_or(&empty, |it| &it.state), &after.state).context(JSON);
    let json = |it: &Change<'_>| serde_json::to_string(&Line::new(after, it)).context(JSON);
    match (format, before) {
        (Format::Table, None) => render(after, format),
        (Format::Table, Some(_)) => Ok(change_table(after, &changes()?)),
        (Format::Json, _) => changes()?.iter().map(|it| Ok(json(it)? + "\n")).collect(),
        (Format::Yaml, _) => changes()?.iter().map(|it| yaml(&Line::new(after, it))).collect(),
    }
}

/// An object that was added, changed or removed.
struct Change<'a> {
    /// `None` for a ServiceCIDR and a node.
    service: Option<&'a ServiceName>,
    key: Key,
    before: Option<Value>,
    after: Option<Value>,
}

/// Identifies an object, within its Service if it is a part of one: the name of a ServiceCIDR or a node, PORT/PROTOCOL of a
/// port, the key of an endpoint.
type Key = (Kind, String);

/// The messages of objects, in their proto3 JSON form.
type Objects = BTreeMap<Key, Value>;

/// Objects of a later kind need one of an earlier kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    ServiceCidr,
    Pod,
    Node,
    /// Without its ports and endpoints.
    Service,
    Port,
    Endpoint,
}

/// In an order in which a port or an endpoint never exists without its Service.
fn changes<'a>(before: &'a NodeState, after: &'a NodeState) -> Result<Vec<Change<'a>>, serde_json::Error> {
    let has_nodes = !Arc::ptr_eq(&before.nodes, &after.nodes);
    let objects = |state| cluster_objects(state, has_nodes);
    let mut changes: Vec<_> = differing(None, objects(before)?, objects(after)?).collect();
    for (service, old, new) in after.diff(before) {
        let objects = |state: Option<_>| state.map_or(Ok(Objects::new()), service_objects);
        let mut of_service: Vec<_> = differing(Some(service), objects(old)?, objects(new)?).collect();
        if new.is_none() {
            of_service.sort_by_key(|it| Reverse(it.key.0));
        }
        changes.extend(of_service);
    }
    Ok(changes)
}

fn differing(
    service: Option<&ServiceName>,
    before: Objects,
    after: Objects,
) -> impl Iterator<Item = Change<'_>> {
    diff::pairs(before, after)
        .filter(|(_, before, after)| before != after)
        .map(move |(key, before, after)| Change { service, key, before, after })
}

/// The objects that belong to no Service; without nodes where they are the same.
fn cluster_objects(state: &NodeState, has_nodes: bool) -> Result<Objects, serde_json::Error> {
    let cidrs = state.service_cidrs.iter();
    let cidrs = cidrs.map(|(name, it)| (Kind::ServiceCidr, name, to_value(wire::service_cidr(it))));
    let pods = state.pods.iter().map(|(name, it)| (Kind::Pod, name, to_value(wire::pod(it))));
    let nodes = state.nodes.iter().filter(|_| has_nodes);
    let nodes = nodes.map(|(name, it)| (Kind::Node, name, to_value(wire::node(name, it))));
    cidrs.chain(pods).chain(nodes).map(|(kind, name, it)| Ok(((kind, name.to_string()), it?))).collect()
}

fn service_objects(state: &Arc<ServiceState>) -> Result<Objects, serde_json::Error> {
    let mut message = wire::service_with_extensions(state, PRINTED_EXTENSIONS);
    let mut objects = Objects::new();
    for it in message.ports.drain(..) {
        let name = format!("{}/{}", it.port, it.protocol().as_str_name());
        objects.insert((Kind::Port, name), to_value(it)?);
    }
    objects.insert((Kind::Service, String::new()), to_value(message)?);
    for it in &state.endpoints {
        let name = wire::endpoint_key(it).to_owned();
        objects.insert((Kind::Endpoint, name), to_value(wire::endpoint(&state.service, it))?);
    }
    Ok(objects)
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::ServiceCidr => "serviceCidr",
            Self::Pod => "pod",
            Self::Node => "node",
            Self::Service => "service",
            Self::Port => "port",
            Self::Endpoint => "endpoint",
        }
    }
}

impl Change<'_> {
    fn choose(&self, [if_added, if_changed, if_removed]: [&'static str; 3]) -> &'static str {
        match (&self.before, &self.after) {
            (None, _) => if_added,
            (_, None) => if_removed,
            (Some(_), Some(_)) => if_changed,
        }
    }
}

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
    #[serde(skip_serializing_if = "str::is_empty")]
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    after: Option<&'a Value>,
}

impl<'a> Line<'a> {
    fn new(published: &'a Published, change: &'a Change<'_>) -> Self {
        Self {
            instance_id: published.instance_id.to_string(),
            rev: published.rev.to_string(),
            node: &published.node,
            change: change.choose(["added", "changed", "removed"]),
            kind: change.key.0.name(),
            service: change.service.map(ToString::to_string),
            name: &change.key.1,
            before: change.before.as_ref(),
            after: change.after.as_ref(),
        }
    }
}

/// The changes for people. Of a Service that was added or removed, the ports and endpoints are no changes of their own.
fn change_table(published: &Published, changes: &[Change<'_>]) -> String {
    let is_whole_service = |it: &Change<'_>| it.key.0 == Kind::Service && it.choose(SIGNS) != "~";
    let whole: BTreeSet<_> = changes.iter().filter(|it| is_whole_service(it)).map(|it| it.service).collect();
    let shown = changes.iter().filter(|it| is_whole_service(it) || !whole.contains(&it.service));
    let rows: Vec<_> = shown.map(|it| row(published, it)).collect();
    let mut text = format!("{}, {}\n", revision(published), counted(rows.len(), "change"));
    if !rows.is_empty() {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).add_rows(rows);
        text.extend(table.lines().map(|it| format!("{}\n", it.trim_end())));
    }
    text
}

fn row(published: &Published, change: &Change<'_>) -> [String; 4] {
    let Change { service, key: (kind, name), before, after } = change;
    let sign = change.choose(SIGNS);
    let all = diff::pairs(fields(before.as_ref()), fields(after.as_ref()));
    let different = all.filter(|(_, before, after)| before != after);
    let mut lines: Vec<_> = different
        .map(|(field, before, after)| {
            let shown = |it: Option<String>| it.unwrap_or_else(|| "-".to_owned());
            match sign {
                "~" => format!("{field}: {} → {}", shown(before), shown(after)),
                _ => format!("{field}: {}", shown(before.or(after))),
            }
        })
        .collect();
    if sign == "+" && *kind == Kind::Service {
        let state = service.and_then(|it| published.state.services.get(it));
        lines.extend(state.into_iter().flat_map(|it| port_targets(it)));
    }
    let separator = if *kind == Kind::Service { "\n" } else { "; " };
    let service = service.map_or_else(|| "-".to_owned(), ToString::to_string);
    let object = format!("{} {name}", kind.name()).trim_end().to_owned();
    [sign.to_owned(), service, object, lines.join(separator)]
}

/// The values in a message by their paths, such as `ips.v4`.
fn fields(message: Option<&Value>) -> BTreeMap<String, String> {
    fn add(path: &str, value: &Value, fields: &mut BTreeMap<String, String>) {
        let inner = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        match value {
            Value::Object(values) => values.iter().for_each(|(name, it)| add(&inner(name), it, fields)),
            Value::Array(values) if values.iter().any(Value::is_object) => {
                (0..)
                    .zip(values)
                    .for_each(|(index, it): (u32, _)| add(&inner(&index.to_string()), it, fields));
            }
            Value::Array(values) => {
                let texts: Vec<_> = values.iter().map(text).collect();
                fields.insert(path.to_owned(), texts.join(", "));
            }
            value => drop(fields.insert(path.to_owned(), text(value))),
        }
    }
    fn text(value: &Value) -> String {
        // The value of an annotation is any text.
        value.as_str().map_or_else(|| value.to_string(), |it| escaped_line(&shortened(it)).into_owned())
    }
    let mut fields = BTreeMap::new();
    message.into_iter().for_each(|it| add("", it, &mut fields));
    fields
}

fn shortened(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}

fn port_targets(state: &ServiceState) -> impl Iterator<Item = String> {
    state.service.ports.iter().enumerate().map(|(index, it)| {
        format!("{}: {}", port_name(it), targets(state, index, Scope::Internal).join(", "))
    })
}
