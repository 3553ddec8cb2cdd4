//! What is reported to the page, as JSON.
//!
//! Invariant: its size is bounded, whatever is served: one page of Services, the endpoints of one of them, and what is new of
//! the timeline.

use std::{
    collections::HashMap,
    net::SocketAddr,
    time::{Duration, SystemTime},
};

use model::{
    Family, Rejections, ServiceName,
    state::{EndpointKey, TrafficPolicy},
};
use pipeline::SyncStatus;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::board::{Board, HISTORY, Rates, Row, SortBy};
use crate::{
    health::Health,
    state::rates::History,
    state::timeline::{Generation, MAX_GENERATIONS, ServiceChange},
    state::{AdminState, Moment},
};

/// How many Services are on a page at most.
const MAX_ROWS: usize = 100;
/// How many endpoints of a service port, problems and rejected items are shown.
const MAX_ENDPOINTS: usize = 500;
const MAX_ITEMS: usize = 20;

/// What the page asks for.
#[derive(Debug, Default)]
pub(super) struct Question {
    search: String,
    sort: SortBy,
    from: usize,
    count: usize,
    /// The Service that is opened.
    service: Option<ServiceName>,
    /// The version of the timeline that the page has.
    since: u64,
}

impl Question {
    /// What is missing or makes no sense has a default.
    pub(super) fn parse(query: &str) -> Self {
        let mut question = Self { count: MAX_ROWS, ..Self::default() };
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "q" => question.search = value.into_owned(),
                "sort" => question.sort = SortBy::parse(&value),
                "from" => question.from = value.parse().unwrap_or_default(),
                "count" => question.count = value.parse().unwrap_or(MAX_ROWS).clamp(1, MAX_ROWS),
                "since" => question.since = value.parse().unwrap_or_default(),
                "service" => {
                    question.service =
                        value.split_once('/').map(|(space, name)| ServiceName::new(space, name));
                }
                _ => {}
            }
        }
        question
    }
}

/// The answer to a question. Times are in milliseconds since 1970, and `read` in those of this process, of which another one
/// numbers its timeline anew.
pub(super) fn answer(state: &AdminState, board: &Board, question: &Question, now: Moment) -> String {
    let ejected = ejected(state);
    let ejected_of = |it: &ServiceName| ejected.get(it).copied().unwrap_or_default();
    let found = board.find(&question.search, question.sort, ejected_of);
    // The last page, if there are fewer than before.
    let from = match question.from {
        from if from < found.len() => from,
        _ => found.len().saturating_sub(1) / question.count * question.count,
    };
    let rows = found.iter().skip(from).take(question.count);
    let rows = rows.map(|it| row(it, ejected_of(&it.state.service.name)));
    let rejected = state.rejected.values().flat_map(Rejections::iter).take(MAX_ITEMS);
    let source = |(name, it): (&String, &SyncStatus)| json!({ "name": name, "isSynced": it.is_synced, "error": it.error });
    let timeline = state.timeline.as_ref();
    let generations = timeline.into_iter().flat_map(|it| it.since(question.since)).map(generation);
    let answer = json!({
        "process": millis(state.started.wall),
        "now": millis(now.wall),
        "node": &*state.node,
        "version": env!("CARGO_PKG_VERSION"),
        "problems": Health::live(state, now).problems.iter().take(MAX_ITEMS).collect::<Vec<_>>(),
        "revision": state.served().map(|it| it.rev),
        "activeSince": state.active.as_ref().map(|it| millis(it.since.wall)),
        "pendingSeconds": state.pending_for(now.instant).map(|it| it.as_secs_f64()),
        "sources": state.sources.iter().map(source).collect::<Value>(),
        "rejected": rejected.map(ToString::to_string).collect::<Value>(),
        "rejectedCount": state.rejected.values().map(Rejections::len).sum::<usize>(),
        "services": board.rows.len(),
        "endpoints": state.totals.endpoints,
        "ejected": state.datapath.table_stats.ejected.len(),
        "isCounted": board.is_counted(),
        "read": board.at.map(|it| it.saturating_duration_since(state.started.instant).as_millis() as u64),
        "history": HISTORY,
        "total": rates(&board.total, board.is_counted()),
        "found": found.len(),
        "from": from,
        "rows": rows.collect::<Value>(),
        "service": question.service.as_ref().map(|it| service(state, board, it)),
        "timeline": {
            "version": timeline.map_or(0, |it| it.version),
            "limit": MAX_GENERATIONS,
            "generations": generations.collect::<Value>(),
        },
    });
    answer.to_string()
}

/// How many endpoints of each Service some clients avoid.
fn ejected(state: &AdminState) -> HashMap<&ServiceName, usize> {
    let mut ejected = HashMap::new();
    for it in &state.datapath.table_stats.ejected {
        *ejected.entry(&it.service).or_default() += 1;
    }
    ejected
}

fn rates(it: &Rates, is_counted: bool) -> Value {
    // A digit behind the point is enough, and shorter.
    let short = |it: f64| (it * 10.0).round() / 10.0;
    let plot = Some(&it.connections).filter(|it| !it.is_zero());
    json!({
        "rate": is_counted.then(|| short(it.connections.now())),
        "refused": short(it.refused),
        "denied": short(it.denied),
        "history": plot.into_iter().flat_map(History::iter).map(short).collect::<Value>(),
    })
}

fn row(it: &Row, ejected: usize) -> Value {
    let service = &it.state.service;
    let ports = service.ports.iter().take(MAX_ITEMS).map(|it| format!("{}/{}", it.port, it.protocol));
    let mut row = json!({
        "name": service.name.to_string(),
        "kind": service.kind.to_string(),
        "addresses": service.cluster_ips,
        "ports": ports.collect::<Value>(),
        "endpoints": it.state.endpoints.len(),
        "ejected": ejected,
    });
    if let (Value::Object(row), Value::Object(rates)) = (&mut row, rates(&it.rates, it.counts.is_some())) {
        row.extend(rates);
    }
    row
}

/// The Service that is opened, with its rules that are not the default in words.
fn service(state: &AdminState, board: &Board, name: &ServiceName) -> Value {
    let Some(row) = board.rows.get(name) else {
        return json!({ "name": name.to_string(), "isServed": false, "rules": [], "external": [], "ports": [] });
    };
    let service = &row.state.service;
    let is_local = |it: TrafficPolicy, what| {
        (it == TrafficPolicy::Local).then(|| format!("{what} traffic stays on this node"))
    };
    let affinity = service.affinity.map(|it| {
        let after = Duration::from_secs(u64::from(it.timeout_seconds.get()));
        format!("a client keeps its endpoint for {after:?} (session affinity)")
    });
    let rules = [
        is_local(service.internal_policy, "internal"),
        is_local(service.external_policy, "external"),
        affinity,
    ];
    json!({
        "name": name.to_string(),
        "isServed": true,
        "kind": service.kind.to_string(),
        "rules": rules.into_iter().flatten().collect::<Value>(),
        "external": service.external_ips.iter().chain(&service.load_balancer_ips).collect::<Vec<_>>(),
        "ports": (0..service.ports.len()).map(|it| port(state, board, row, it)).collect::<Value>(),
    })
}

/// A port of a Service: its cluster IPs with the port, and its endpoints with their connections so far.
fn port(state: &AdminState, board: &Board, row: &Row, index: usize) -> Value {
    let service = &row.state.service;
    let port = &service.ports[index];
    let ejected = state.datapath.table_stats.ejected.iter();
    let ejected = ejected.filter(|it| it.service == service.name && it.port == port.name);
    let ejected: HashMap<_, _> = ejected.map(|it| (it.endpoint, it.clients)).collect();
    let targets = row.state.endpoints.iter().flat_map(|it| {
        let target = it.ports.iter().find(|it| usize::from(it.index) == index);
        let addresses = Family::ALL.into_iter().filter_map(|family| it.address(family));
        addresses.filter_map(move |ip| Some((it, SocketAddr::new(ip, target?.port.get()))))
    });
    let connections =
        |it| board.counters.as_ref().map(|all| all.endpoint(&service.name, &port.name, port.protocol, it));
    let endpoints = targets.clone().take(MAX_ENDPOINTS).map(|(it, target)| {
        let pod = match &it.key {
            EndpointKey::Pod(name) => Some(&**name),
            EndpointKey::Anonymous(_) => None,
        };
        json!({
            "endpoint": target,
            "pod": pod,
            "isLocal": it.local,
            "isTerminating": it.serving_terminating,
            "connections": connections(target),
            "ejectedFor": ejected.get(&target).copied().unwrap_or_default(),
        })
    });
    let own = service.cluster_ips.iter().filter(|it| !port.conflicting_addresses.contains(it));
    json!({
        "name": port.name,
        "protocol": port.protocol.to_string(),
        "port": port.port,
        "nodePort": port.node_port,
        "addresses": own.map(|ip| SocketAddr::new(*ip, port.port.get())).collect::<Vec<_>>(),
        "endpoints": endpoints.collect::<Value>(),
        "more": targets.count().saturating_sub(MAX_ENDPOINTS),
    })
}

/// A generation: the time since the change in the cluster in milliseconds, and the durations of its steps in microseconds.
fn generation(it: &Generation) -> Value {
    let published = it.published;
    let micros = |from: Instant, to: Instant| to.saturating_duration_since(from).as_micros() as u64;
    let (received, computed) = it.computing.unwrap_or((published.instant, published.instant));
    let received_wall = published.wall.checked_sub(published.instant.saturating_duration_since(received));
    let source = it.triggered.zip(received_wall).and_then(|(from, to)| to.duration_since(from).ok());
    json!({
        "id": format!("{:x}-{}", it.key.0, it.key.1),
        "revision": it.key.1,
        "published": millis(published.wall),
        "sourceMillis": source.map(|it| it.as_millis() as u64),
        "brainMicros": it.computing.map(|(received, computed)| micros(received, computed)),
        "publishMicros": it.dequeued.map(|taken| micros(computed, taken)),
        "activeMicros": it.dequeued.zip(it.active).map(|(taken, active)| micros(taken, active)),
        "isSkipped": it.is_skipped,
        "changes": it.changes.iter().map(change).collect::<Value>(),
        "changed": it.changed,
        "entries": it.entries,
        "isFull": it.is_full,
        "failures": it.failures,
        "error": it.error,
    })
}

fn change(it: &ServiceChange) -> Value {
    let (before, after) = it.endpoints;
    json!({ "service": it.service.to_string(), "before": before, "after": after, "isRedefined": it.is_redefined })
}

fn millis(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
