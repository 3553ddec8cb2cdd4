//! A published state as JSON, in parts: a large state is never one text.

use std::{collections::BTreeMap, iter, sync::Arc};

use model::state::ServiceState;
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
    let nodes = BTreeMap::clone(&state.nodes).into_iter().map(|(name, it)| wire::node(&name, &it));
    let service_cidrs = BTreeMap::clone(&state.service_cidrs).into_values();
    let service_cidrs = service_cidrs.map(|it| wire::service_cidr(&it));
    let pods = BTreeMap::clone(&state.pods).into_values().map(|it| wire::pod(&it));
    let lists = list("nodes", nodes).chain(list("serviceCidrs", service_cidrs)).chain(list("pods", pods));
    iter::once(head).chain(items).chain(text("]")).chain(lists).chain(text("}\n"))
}

type Part = serde_json::Result<String>;

fn text(text: &'static str) -> impl Iterator<Item = Part> {
    iter::once_with(|| Ok(text.to_owned()))
}

/// A Service with its endpoints.
fn item(is_first: bool, state: Arc<ServiceState>) -> impl Iterator<Item = Part> {
    let service = json(&wire::service_with_extensions(&state, PRINTED_EXTENSIONS));
    let head =
        service.map(|it| format!(r#"{}{{"service":{it},"endpoints":["#, if is_first { "" } else { "," }));
    let endpoints = (0..state.endpoints.len())
        .map(move |n| Ok(comma(n == 0, json(&wire::endpoint(&state.service, &state.endpoints[n]))?)));
    iter::once(head).chain(endpoints).chain(text("]}"))
}

/// A field with these messages; nothing if there are none.
fn list<I: ExactSizeIterator<Item: Serialize>>(
    name: &'static str,
    messages: I,
) -> impl Iterator<Item = Part> {
    let (open, close) =
        if messages.len() == 0 { (String::new(), "") } else { (format!(r#","{name}":["#), "]") };
    let messages = messages.enumerate().map(|(n, it)| json(&it).map(|it| comma(n == 0, it)));
    iter::once(Ok(open)).chain(messages).chain(text(close))
}

fn json(value: &(impl Serialize + ?Sized)) -> Part {
    serde_json::to_string(value)
}

/// An element of an array, separated from the one before.
fn comma(is_first: bool, json: String) -> String {
    if is_first { json } else { format!(",{json}") }
}
