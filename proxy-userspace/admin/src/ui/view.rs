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
    state::{EndpointKey, ServiceKind, TrafficPolicy},
};
use serde::Serialize;
use tokio::time::Instant;

use super::board::{Board, HISTORY, Rates, Row, SortBy};
use crate::{
    health::Health,
    rates::History,
    state::{AdminState, Moment},
    timeline::{Generation, MAX_GENERATIONS, ServiceChange, Timeline},
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

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer<'a> {
    /// When the process started: another one numbers its timeline anew.
    process: u64,
    /// In milliseconds since 1970.
    now: u64,
    node: &'a str,
    version: &'static str,
    problems: Vec<String>,
    revision: Option<u64>,
    active_since: Option<u64>,
    pending_seconds: Option<f64>,
    sources: Vec<Source<'a>>,
    rejected: Vec<String>,
    rejected_count: usize,
    services: usize,
    endpoints: usize,
    ejected: usize,
    /// Whether connections are counted.
    is_counted: bool,
    /// When they were read last, in milliseconds of this process.
    read: Option<u64>,
    /// How many rates a plot has.
    history: usize,
    total: RatesView,
    found: usize,
    from: usize,
    rows: Vec<RowView>,
    service: Option<ServiceView>,
    timeline: TimelineView,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Source<'a> {
    name: &'a str,
    is_synced: bool,
    error: Option<&'a str>,
}

#[derive(Serialize)]
struct RatesView {
    rate: Option<f64>,
    refused: f64,
    denied: f64,
    history: Vec<f64>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RowView {
    name: String,
    kind: &'static str,
    addresses: Vec<String>,
    ports: Vec<String>,
    endpoints: usize,
    ejected: usize,
    #[serde(flatten)]
    rates: RatesView,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ServiceView {
    name: String,
    is_served: bool,
    kind: Option<&'static str>,
    /// Its rules that are not the default, in words.
    rules: Vec<String>,
    external: Vec<String>,
    ports: Vec<PortView>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PortView {
    name: String,
    protocol: String,
    port: u16,
    node_port: Option<u16>,
    /// Its cluster IPs, with the port.
    addresses: Vec<String>,
    endpoints: Vec<EndpointView>,
    more: usize,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct EndpointView {
    endpoint: String,
    pod: Option<String>,
    is_local: bool,
    is_terminating: bool,
    /// How many connections it had.
    connections: Option<u64>,
    ejected_for: usize,
}

#[derive(Serialize)]
struct TimelineView {
    version: u64,
    /// How many generations are kept.
    limit: usize,
    generations: Vec<GenerationView>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct GenerationView {
    /// The instance and the revision.
    id: String,
    revision: u64,
    /// In milliseconds since 1970.
    published: u64,
    /// Since the change in the cluster, in milliseconds.
    source_millis: Option<u64>,
    /// The durations of the steps, in microseconds.
    brain_micros: Option<u64>,
    publish_micros: Option<u64>,
    active_micros: Option<u64>,
    is_skipped: bool,
    changes: Vec<ChangeView>,
    changed: usize,
    entries: usize,
    is_full: bool,
    failures: usize,
    error: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ChangeView {
    service: String,
    before: Option<usize>,
    after: Option<usize>,
    is_redefined: bool,
}

/// The answer to a question.
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
    let rejected = state.rejected.values().flat_map(Rejections::iter);
    let answer = Answer {
        process: millis(state.started.wall),
        now: millis(now.wall),
        node: &state.node,
        version: env!("CARGO_PKG_VERSION"),
        problems: Health::live(state, now).into_problems().into_iter().take(MAX_ITEMS).collect(),
        revision: state.served().map(|it| it.rev),
        active_since: state.active.as_ref().map(|it| millis(it.since.wall)),
        pending_seconds: state.pending_for(now.instant).map(|it| it.as_secs_f64()),
        sources: state.sources.iter().map(|(name, it)| source(name, it)).collect(),
        rejected: rejected.take(MAX_ITEMS).map(ToString::to_string).collect(),
        rejected_count: state.rejected.values().map(Rejections::len).sum(),
        services: board.len(),
        endpoints: state.totals.endpoints,
        ejected: state.table_stats.ejected.len(),
        is_counted: board.is_counted(),
        read: board
            .read_at()
            .map(|it| it.saturating_duration_since(state.started.instant).as_millis() as u64),
        history: HISTORY,
        total: rates(board.total(), board.is_counted()),
        found: found.len(),
        from,
        rows: rows.map(|it| row(it, ejected_of(&it.state.service.name))).collect(),
        service: question.service.as_ref().map(|it| service(state, board, it)),
        timeline: TimelineView {
            version: state.timeline.as_ref().map_or(0, Timeline::version),
            limit: MAX_GENERATIONS,
            generations: state
                .timeline
                .iter()
                .flat_map(|it| it.since(question.since))
                .map(generation)
                .collect(),
        },
    };
    serde_json::to_string(&answer).unwrap_or_default()
}

/// How many endpoints of each Service some clients avoid.
fn ejected(state: &AdminState) -> HashMap<&ServiceName, usize> {
    let mut ejected = HashMap::new();
    for it in &state.table_stats.ejected {
        *ejected.entry(&it.service).or_default() += 1;
    }
    ejected
}

fn source<'a>(name: &'a str, it: &'a pipeline::SyncStatus) -> Source<'a> {
    Source { name, is_synced: it.is_synced, error: it.error.as_deref() }
}

fn rates(it: &Rates, is_counted: bool) -> RatesView {
    // A digit behind the point is enough, and shorter.
    let short = |it: f64| (it * 10.0).round() / 10.0;
    let plot = Some(&it.connections).filter(|it| !it.is_zero());
    RatesView {
        rate: is_counted.then(|| short(it.connections.now())),
        refused: short(it.refused),
        denied: short(it.denied),
        history: plot.into_iter().flat_map(History::iter).map(short).collect(),
    }
}

fn row(it: &Row, ejected: usize) -> RowView {
    let service = &it.state.service;
    let ports = service.ports.iter().take(MAX_ITEMS).map(|it| format!("{}/{}", it.port, it.protocol));
    RowView {
        name: service.name.to_string(),
        kind: kind(service.kind),
        addresses: service.cluster_ips.iter().map(ToString::to_string).collect(),
        ports: ports.collect(),
        endpoints: it.state.endpoints.len(),
        ejected,
        rates: rates(&it.rates, it.counts.is_some()),
    }
}

fn kind(it: ServiceKind) -> &'static str {
    match it {
        ServiceKind::ClusterIp => "ClusterIP",
        ServiceKind::NodePort => "NodePort",
        ServiceKind::LoadBalancer => "LoadBalancer",
    }
}

fn service(state: &AdminState, board: &Board, name: &ServiceName) -> ServiceView {
    let Some(row) = board.get(name) else {
        return ServiceView {
            name: name.to_string(),
            is_served: false,
            kind: None,
            rules: Vec::new(),
            external: Vec::new(),
            ports: Vec::new(),
        };
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
    let external = service.external_ips.iter().chain(&service.load_balancer_ips);
    ServiceView {
        name: name.to_string(),
        is_served: true,
        kind: Some(kind(service.kind)),
        rules: rules.into_iter().flatten().collect(),
        external: external.map(ToString::to_string).collect(),
        ports: (0..service.ports.len()).map(|it| port(state, board, row, it)).collect(),
    }
}

fn port(state: &AdminState, board: &Board, row: &Row, index: usize) -> PortView {
    let service = &row.state.service;
    let port = &service.ports[index];
    let ejected = state.table_stats.ejected.iter();
    let ejected = ejected.filter(|it| it.service == service.name && it.port == port.name);
    let ejected: HashMap<_, _> = ejected.map(|it| (it.endpoint, it.clients)).collect();
    let targets = row.state.endpoints.iter().flat_map(|it| {
        let target = it.ports.iter().find(|it| usize::from(it.index) == index);
        let addresses = Family::ALL.into_iter().filter_map(|family| it.address(family));
        addresses.filter_map(move |ip| Some((it, SocketAddr::new(ip, target?.port.get()))))
    });
    let endpoints = targets.clone().take(MAX_ENDPOINTS).map(|(it, target)| EndpointView {
        endpoint: target.to_string(),
        pod: match &it.key {
            EndpointKey::Pod(name) => Some(name.to_string()),
            EndpointKey::Anonymous(_) => None,
        },
        is_local: it.local,
        is_terminating: it.serving_terminating,
        connections: board.counters().map(|it| it.endpoint(&service.name, &port.name, port.protocol, target)),
        ejected_for: ejected.get(&target).copied().unwrap_or_default(),
    });
    let own = service.cluster_ips.iter().filter(|it| !port.conflicting_addresses.contains(it));
    PortView {
        name: port.name.clone(),
        protocol: port.protocol.to_string(),
        port: port.port.get(),
        node_port: port.node_port.map(Into::into),
        addresses: own.map(|ip| SocketAddr::new(*ip, port.port.get()).to_string()).collect(),
        endpoints: endpoints.collect(),
        more: targets.count().saturating_sub(MAX_ENDPOINTS),
    }
}

fn generation(it: &Generation) -> GenerationView {
    let published = it.published;
    let micros = |from: Instant, to: Instant| to.saturating_duration_since(from).as_micros() as u64;
    let received = it.computing.map_or(published.instant, |(received, _)| received);
    let received = published.wall.checked_sub(published.instant.saturating_duration_since(received));
    let source = it.triggered.zip(received).and_then(|(from, to)| to.duration_since(from).ok());
    GenerationView {
        id: format!("{:x}-{}", it.key.0, it.key.1),
        revision: it.key.1,
        published: millis(published.wall),
        source_millis: source.map(|it| it.as_millis() as u64),
        brain_micros: it.computing.map(|(received, computed)| micros(received, computed)),
        publish_micros: it
            .dequeued
            .map(|taken| micros(it.computing.map_or(published.instant, |(_, computed)| computed), taken)),
        active_micros: it.dequeued.zip(it.active).map(|(taken, active)| micros(taken, active)),
        is_skipped: it.is_skipped,
        changes: it.changes.iter().map(change).collect(),
        changed: it.changed,
        entries: it.entries,
        is_full: it.is_full,
        failures: it.failures,
        error: it.error.clone(),
    }
}

fn change(it: &ServiceChange) -> ChangeView {
    let (before, after) = it.endpoints;
    ChangeView { service: it.service.to_string(), before, after, is_redefined: it.is_redefined }
}

fn millis(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
