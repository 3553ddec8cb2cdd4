//! A published state as JSON, in parts: a large state is never one text.

use std::{collections::BTreeMap, iter, ops::Bound, sync::Arc};

use model::state::{NodeState, ServiceState};
use proxy_contract::localv1::Extension;
use serde::Serialize;
use wire::Extensions;

use crate::publisher::Published;

/// The extensions in the messages of printed states. The trigger time is not part of a state.
pub const PRINTED_EXTENSIONS: Extensions = Extensions::LOCAL.without(&[Extension::TriggerTimes]);

/// The parts of the JSON of a state, each rendered when it is asked for, and none larger than a Service or an endpoint.
pub fn json_parts(published: &Published) -> impl Iterator<Item = serde_json::Result<String>> + Send + use<> {
    // 64-bit integers are strings in proto3 JSON, because many parsers have only 53 bits.
    let Published { instance_id, rev, node, state, .. } = published;
    let head = json(&**node)
        .map(|node| format!(r#"{{"instanceId":"{instance_id}","rev":"{rev}","node":{node},"items":["#));
    let items = state.services.clone().into_values().enumerate().flat_map(|(n, it)| item(n == 0, it));
    let nodes = list("nodes", state, |it| &it.nodes, |name, it| serde_json::to_string(&wire::node(name, it)));
    let service_cidrs = list(
        "serviceCidrs",
        state,
        |it| &it.service_cidrs,
        |_, it| serde_json::to_string(&wire::service_cidr(it)),
    );
    let pods = list("pods", state, |it| &it.pods, |_, it| serde_json::to_string(&wire::pod(it)));
    let parts = iter::once(head).chain(items).chain(text("]"));
    parts.chain(nodes).chain(service_cidrs).chain(pods).chain(text("}\n"))
}

type Part = serde_json::Result<String>;

fn text(text: &'static str) -> impl Iterator<Item = Part> {
    iter::once_with(|| Ok(text.to_owned()))
}

fn item(is_first: bool, state: Arc<ServiceState>) -> impl Iterator<Item = Part> {
    let service = json(&wire::service_with_extensions(&state, PRINTED_EXTENSIONS));
    let head =
        service.map(|it| format!(r#"{}{{"service":{it},"endpoints":["#, if is_first { "" } else { "," }));
    let endpoints = (0..state.endpoints.len())
        .map(move |n| Ok(comma(n == 0, json(&wire::endpoint(&state.service, &state.endpoints[n]))?)));
    iter::once(head).chain(endpoints).chain(text("]}"))
}

/// A field with the objects of a map of a state; nothing if there are none.
fn list<T: 'static>(
    name: &'static str,
    state: &NodeState,
    map: fn(&NodeState) -> &BTreeMap<Arc<str>, T>,
    json: fn(&str, &T) -> Part,
) -> impl Iterator<Item = Part> + use<T> {
    let state = state.clone();
    let (open, close) =
        if map(&state).is_empty() { (String::new(), "") } else { (format!(r#","{name}":["#), "]") };
    // A position would not survive the reference to the map: the last name does.
    let mut last = None::<Arc<str>>;
    let objects = iter::from_fn(move || {
        let after = last.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let (name, it) = map(&state).range::<Arc<str>, _>((after, Bound::Unbounded)).next()?;
        let object = json(name, it).map(|it| comma(last.is_none(), it));
        last = Some(Arc::clone(name));
        Some(object)
    });
    iter::once(Ok(open)).chain(objects).chain(text(close))
}

fn json(value: &(impl Serialize + ?Sized)) -> Part {
    serde_json::to_string(value)
}

/// An element of an array, separated from the one before.
fn comma(is_first: bool, json: String) -> String {
    if is_first { json } else { format!(",{json}") }
}
